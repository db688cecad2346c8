"""What images are drawn for: classes, fillings of a template, free captions."""

from pathlib import Path
from typing import Any

import pytest

from dpsynth.errors import DataError
from dpsynth.planning.captions import FreeCaptions, Template
from dpsynth.planning.schema import Plan
from dpsynth.released.asked import asked_of

CLASSES = ["cat", "dog"]
SLOTS = {"size": ["big", "small", "tiny"]}


def plan(captions: Any = None, drawn: Path | None = None) -> Plan:
    """A plan with these captions; what a model of it needs besides is not asked here."""
    made = Plan.model_validate(
        {
            "name": "asked",
            "budget": {"epsilon": 1.0, "delta": 1e-6},
            "private": {
                "source": {"kind": "npz", "path": "/nonexistent/private.npz"},
                "capacity": 100,
                "image": {"height": 8, "width": 8},
                "classes": CLASSES,
                "held_out": {"by": "hash", "fraction": 0.2},
            },
            "public": [{"kind": "letters", "count": 20}],
            "representation": {"kind": "pca", "code": 4},
            "stages": {"moments": {}},
        }
    )
    private = made.private.model_copy(update={"captions": captions})
    sampling = made.sampling.model_copy(update={"captions": drawn})
    return made.model_copy(update={"private": private, "sampling": sampling})


def test_classes_are_asked_for_by_name() -> None:
    asked = asked_of(plan())
    assert (asked.captions, asked.classes.tolist(), asked.count) == (CLASSES, [0, 1], 2)


def test_each_filling_is_labelled_by_its_class() -> None:
    template = Template(kind="template", template="a {size} {class}", slots=SLOTS)
    asked = asked_of(plan(template))
    assert asked.count == 6
    assert asked.captions[0] == "a big cat" and asked.captions[-1] == "a tiny dog"
    for caption, place in zip(asked.captions, asked.classes.tolist(), strict=True):
        assert caption.endswith(CLASSES[place])


def test_free_captions_are_labelled_by_the_class_they_name(tmp_path: Path) -> None:
    file = tmp_path / "drawn.txt"
    file.write_text("a Dog in the rain\nthe cat, asleep\n")
    asked = asked_of(plan(FreeCaptions(kind="free"), file))
    assert asked.classes.tolist() == [1, 0]
    for wrong in ("a concatenation\n", "a cat and a dog\n"):
        file.write_text(wrong)
        with pytest.raises(DataError, match="of the declared classes"):
            asked_of(plan(FreeCaptions(kind="free"), file))
