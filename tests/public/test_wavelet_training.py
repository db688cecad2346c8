"""Training of the spectral tokenizer on scikit-learn's digits: small, and it has to work."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from dpsynth.artifacts.tensors import load_tensors
from dpsynth.errors import BudgetError
from dpsynth.models.wavelet.tokenizer import TokenizerSettings
from dpsynth.public.tokenizer import (
    SHEET,
    TOKENIZER,
    TokenizerTraining,
    curve_of,
    fit_tokenizer,
    pretrain_tokenizer,
    report,
    show_scales,
    some,
)

SIZES = TokenizerSettings(
    8, 8, 1, levels=1, patches=(1, 2), hidden=32, depth=1, heads=2, codebook=48, code=4
)
TINY = TokenizerTraining(steps=6, batch=16)


@pytest.fixture(scope="module")
def digits():
    images = (load_digits().images * 255 / 16).round().astype(np.uint8)[..., None]
    return images[:1500], images[1500:]


@pytest.fixture(scope="module")
def fitted(digits):
    taken = []
    found = fit_tokenizer(
        digits[0],
        SIZES,
        TokenizerTraining(steps=150, batch=64, learning_rate=3e-3),
        seed=0,
        advance=lambda: taken.append(1),
    )
    assert len(taken) == 150
    return found


def test_unseen_digits_are_rebuilt_and_better_with_every_scale(digits, fitted):
    facts = report(fitted.tokenizer, digits[1])
    coarse, fine = facts["decoded"]
    assert coarse < 0.8 * facts["mean"]
    assert fine < 0.4 * coarse
    assert fine < 0.2 * facts["mean"]
    # A prefix of tokens comes near the exact coefficients, and never below them by much.
    assert facts["kept"][0] * 0.99 < coarse < 1.3 * facts["kept"][0]
    assert facts["kept"][1] < 1e-12


def test_codebooks_stay_in_use(digits, fitted):
    facts = report(fitted.tokenizer, digits[1])
    for use in facts["codebook"].values():
        assert use["share"] > 0.8
        assert use["perplexity"] > 0.4 * SIZES.codebook
    assert set(facts["codebook"]) == {"approximation", "details"}
    assert facts["use_by_scale"] == [*facts["codebook"].values()]  # one scale of details


def test_losses_fall_and_are_numbers(fitted):
    first, last = fitted.curve[0], fitted.curve[-1]
    assert (first.step, last.step) == (0, 149)
    assert 50 <= len(fitted.curve) <= 52
    assert all(
        after < 0.5 * before for before, after in zip(first.errors, last.errors, strict=True)
    )
    assert json.loads(json.dumps(last.to_json()))["errors"] == list(last.errors)


def test_figures_by_hand(digits, fitted):
    images, tokenizer = digits[1][:300], fitted.tokenizer  # more than one part
    facts = report(tokenizer, images)
    wanted = torch.from_numpy(images).double() / 255
    pyramid = tokenizer.wavelet(wanted)
    energy = [float(part.square().sum()) for part in (pyramid.ll, *pyramid.details)]
    assert facts["energy"] == pytest.approx([e / sum(energy) for e in energy], rel=1e-4)
    assert facts["mean"] == pytest.approx(float((wanted - wanted.mean(0)).square().mean()))
    ids = tokenizer.encode(wanted.float())
    for scale, figure in enumerate(facts["decoded"]):
        given = tokenizer.decode(ids[:, : tokenizer.layout.coarse(scale)])
        assert figure == pytest.approx(float((given - wanted).square().mean()), rel=1e-4)


@pytest.mark.parametrize("shared", [False, True])
def test_a_seed_fixes_a_tokenizer_and_nothing_else(digits, shared):
    sizes = TokenizerSettings(
        8, 8, 1, 2, (1, 1, 2), hidden=8, depth=1, heads=1, codebook=8, code=2, shared=shared
    )
    before = torch.random.get_rng_state()
    first, again, other = (
        fit_tokenizer(digits[0], sizes, TINY, seed=seed).tokenizer.state_dict()
        for seed in (1, 1, 2)
    )
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    assert not all(torch.equal(value, other[name]) for name, value in first.items())
    assert set(
        report(fit_tokenizer(digits[0], sizes, TINY, seed=1).tokenizer, digits[1])["codebook"]
    ) == ({"all"} if shared else {"approximation", "details"})


def test_images_are_altered_before_they_are_seen(digits):
    seen = []

    def altered(images, source):
        assert isinstance(source, torch.Generator)
        assert images.dtype == torch.float32
        assert 0 <= float(images.min()) <= float(images.max()) <= 1
        seen.append(images.shape)
        return 1 - images

    fit_tokenizer(digits[0], SIZES, TINY, seed=0, altered=altered)
    assert seen == [(16, 8, 8, 1)] * 6


def test_it_is_written_once_and_kept(digits, tmp_path, capsys):
    path, replaced = tmp_path / TOKENIZER, []

    def made(recipe, stale=replaced.append):
        return pretrain_tokenizer(
            path, digits[0][:200], SIZES, TINY, recipe=recipe, seed=3, stale=stale
        )

    tokenizer = made("one")
    curve = curve_of(path)
    assert [point["step"] for point in curve] == list(range(6))
    assert load_tensors(path)[1]["recipe"] == "one"
    first = path.read_bytes()
    kept = made("one")
    assert "tokenizer: kept" in capsys.readouterr().err
    assert (path.read_bytes(), curve_of(path)) == (first, curve)
    assert torch.equal(
        kept.encode(torch.from_numpy(digits[1])), tokenizer.encode(torch.from_numpy(digits[1]))
    )
    made("two")
    assert path.read_bytes() != first
    assert replaced == [path, path]

    def refuse(path):
        raise BudgetError(path.name)

    with pytest.raises(BudgetError):
        made("three", stale=refuse)


def test_the_sheet_has_a_row_for_each_scale(digits, fitted, tmp_path):
    path = show_scales(fitted.tokenizer, some(digits[1], seed=0, most=4), tmp_path / SHEET)
    with Image.open(path) as sheet:
        assert sheet.size[0] > sheet.size[1] > 100


def test_raster_order_has_one_codebook_and_is_learnt_too(digits):
    sizes = TokenizerSettings(8, 8, 1, 0, (2,), hidden=16, depth=1, heads=2, codebook=32, code=4)
    training = TokenizerTraining(steps=100, batch=64, learning_rate=3e-3)
    tokenizer = fit_tokenizer(digits[0], sizes, training, seed=0).tokenizer
    facts = report(tokenizer, digits[1])
    assert (facts["energy"], facts["kept"]) == ([1.0], [0.0])
    assert facts["decoded"][0] < 0.5 * facts["mean"]
    assert set(facts["codebook"]) == {"all"}
    assert facts["codebook"]["all"]["share"] > 0.8
    assert len(tokenizer.codebooks) == 1
    # The other kind of tokens does not exist: nothing of the model is left untrained.
    assert not any(f"kinds.{1}." in name for name, _ in tokenizer.named_parameters())


@pytest.mark.parametrize("steps", [1, 10, 11])
def test_a_rise_of_a_single_step_is_no_division_by_zero(digits, steps):
    """A tenth of 10 steps ends at step 0."""
    training = TokenizerTraining(steps=steps, batch=16)
    found = fit_tokenizer(digits[0][:64], SIZES, training, seed=0)
    assert [point.step for point in found.curve] == list(range(steps))
    assert all(np.isfinite(point.errors).all() for point in found.curve)
