"""Captions as tokens: words, padding, the frozen table."""

import hashlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpsynth.errors import UsageError
from dpsynth.models.text import PADDING, START, require_distinct, table, tokens, word_id, words

KNOWN = (
    "0 1 2 3 4 5 6 7 8 9 zero one two three four five six seven eight nine "
    "t shirt top trouser pullover dress coat sandal sneaker bag ankle boot "
    "thin bold thick stroke upper lower left right of"
)


def test_words_are_lower_case_and_signs_beyond_ascii_count():
    assert words("A T-shirt/Top, BOLD!") == ["a", "t", "shirt", "top", "bold"]
    assert words("😀 grin") == ["😀", "grin"]
    assert words(" -- ") == []


def test_common_class_names_keep_apart_in_the_papers_table():
    known = words(KNOWN)
    assert len({word_id(word, 256) for word in known}) == len(known) == 41


@given(st.lists(st.text(max_size=40), max_size=5), st.integers(1, 9), st.integers(3, 300))
def test_tokens_are_the_first_words_and_padding(captions, length, vocabulary):
    ids = tokens(captions, length, vocabulary)
    assert ids.dtype == torch.int64
    assert ids.shape == (len(captions), length)
    for caption, row in zip(captions, ids.tolist(), strict=True):
        found = [word_id(word, vocabulary) for word in words(caption)][:length] or [START]
        assert row == found + [PADDING] * (length - len(found))
        assert all(1 <= number < vocabulary for number in found)


def test_a_table_without_rows_for_words_is_refused():
    with pytest.raises(UsageError, match="no row"):
        tokens(["one"], 3, 2)


def test_the_table_is_frozen_in_its_bits():
    found = table(256, 64)
    assert found.shape == (256, 64)
    digest = hashlib.sha256(found.numpy().astype("<f4").tobytes()).hexdigest()
    assert digest == "904e7caf2e2000c44e92d0fd3a5dc3aa2bca49df91fc94b9cca1dc630585c4e5"
    assert torch.equal(found[:7], table(7, 64))


def test_the_tables_entries_have_mean_zero_and_variance_one():
    found = table(256, 64).double()
    assert abs(float(found.mean())) < 0.02
    assert abs(float(found.var()) - 1) < 0.02
    overlap = found @ found.T / 64 - torch.eye(256)
    assert float(overlap.abs().max()) < 0.7


def test_captions_that_no_model_could_tell_apart_are_refused():
    captions = ["a big cat", "a big dog"]
    require_distinct(captions, tokens(captions, 3, 256))
    with pytest.raises(UsageError, match="'a big cat' and 'a big dog'"):
        require_distinct(captions, tokens(captions, 2, 256))
    with pytest.raises(UsageError, match="'' and '--'"):
        require_distinct(["--"], tokens(["--"], 2, 256))
