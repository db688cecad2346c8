"""A template's captions and the conditions they name: inverses, whatever capitals and spaces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpsynth.planning.caption_rules import MOST_CAPTION, caption_rule, caption_text
from dpsynth.planning.captions import FreeCaptions, Template, words_of

WORD = st.text("abcXY", min_size=1, max_size=3)
VALUES = st.lists(WORD, min_size=1, max_size=3, unique_by=str.casefold)


def template(text="a {stroke} {class}, {where}", **slots):
    return Template(kind="template", template=text, slots=slots)


@st.composite
def worlds(draw):
    """A template of words between spaces, and its classes."""
    names = draw(st.permutations(["class", "stroke", "where"]))
    slots = {name: draw(VALUES) for name in names if name != "class"}
    text = " of ".join(f"{{{name}}}" for name in names)
    return template(text, **slots), draw(VALUES)


@given(worlds(), st.data())
def test_a_caption_names_the_condition_that_it_was_made_from(world, data):
    made, classes = world
    captions, rule = made.captions(classes), caption_rule(made, classes)
    assert len(captions) == made.count(classes) and made.alike(classes) is None
    number = data.draw(st.integers(0, len(captions) - 1))
    spaces = data.draw(st.sampled_from([" ", "  ", "\t", " \n"]))
    mangled = spaces + captions[number].replace(" ", spaces).swapcase() + spaces
    for text in (captions[number], mangled, caption_text(mangled)):
        assert made.condition(text, classes) == rule.condition(text) == number
    # Independently: the values at the slots' places, and the class among them.
    filling = made.fillings(classes)[number]
    values = [v[k] for v, k in zip(made.values(classes), filling, strict=True)]
    assert captions[number] == " of ".join(values)
    assert made.owners(classes)[number] == filling[made.names.index("class")]
    assert rule.judged(captions[number], None) == (made.owners(classes)[number], "")


@given(worlds(), st.text(max_size=20))
def test_no_other_text_names_a_condition(world, text):
    made, classes = world
    known = {words_of(caption) for caption in made.captions(classes)}
    assert (made.condition(text, classes) is None) is (words_of(text) not in known)


@given(st.text())
def test_a_caption_is_one_clean_line_and_reading_it_again_changes_nothing(text):
    read = caption_text(text)
    assert caption_text(read) == read and read.splitlines() in ([], [read])
    read.encode()  # no half characters


def test_what_is_no_caption():
    for value in (None, 3, True, "", " \n", "x" * (MOST_CAPTION + 1), "\udc80", b"a"):
        assert caption_text(value) == ""


def test_fillings_that_read_alike_are_found():
    assert template("{stroke}{class}", stroke=["a", "ab"]).alike(["bc", "c"]) == ("abc", "abc")
    assert template("{class}").alike(["A", "a"]) == ("A", "a")
    assert template("{class}").alike(["a", "b"]) is None


@pytest.mark.parametrize("label", [0, 1, None])
def test_a_label_must_agree_with_the_captions_class(label):
    rule = caption_rule(template("a {class}"), ["cat", "dog"])
    found, fault = rule.judged("a dog", label)
    assert (fault == "") is (label != 0)
    if not fault:
        assert found == 1


def test_free_captions_need_a_label_unless_there_is_one_class():
    free = FreeCaptions(kind="free")
    assert caption_rule(free, ["a", "b"]).judged("any", None)[1]
    assert caption_rule(free, ["a"]).judged("any", None) == (0, "")
    assert caption_rule(free, ["a", "b"]).judged("any", 1) == (1, "")
    assert caption_rule(free, ["a", "b"]).judged("", 1)[1]
    assert caption_rule(None, ["a"]) is None
