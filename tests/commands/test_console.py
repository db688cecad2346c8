"""Results on stdout alone; curator-only values only where they may be shown."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from dpsynth import console
from dpsynth.commands import _measured_table as shown_as
from dpsynth.commands import _options as opt
from dpsynth.errors import BudgetError

Capture = pytest.CaptureFixture[str]


def test_json_has_no_nan_and_takes_numpy(capsys: Capture) -> None:
    console.result(
        {"a": math.nan, "b": np.float64(0.5), "c": [np.int64(3), math.inf], "d": Path("x")},
        json=True,
    )
    out, err = capsys.readouterr()
    assert json.loads(out) == {"a": None, "b": 0.5, "c": [3, None], "d": "x"}
    assert err == ""


def test_text_is_lines_a_string_or_a_renderable(capsys: Capture) -> None:
    console.result({"a": {"b": 1.23456789, "c": True}, "d": None})
    assert capsys.readouterr().out == "a.b: 1.2346\na.c: yes\nd: -\n"
    console.result({}, text=lambda: "hello [not markup]")
    assert capsys.readouterr().out == "hello [not markup]\n"
    console.result({}, text=lambda: console.table(["x", "y"], [["[red]", 0.1]]))
    assert "[red]" in capsys.readouterr().out


def test_progress_without_a_terminal_is_two_lines_on_stderr(capsys: Capture) -> None:
    with console.progress("steps", 3) as bar:
        bar.advance()
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "steps ...\nsteps: done\n"


def test_fail_says_what_to_type_and_exits(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        console.fail(BudgetError("spent", hint="dpsynth status"))
    assert caught.value.code == 3
    assert capsys.readouterr().err == "error: spent\ntry: dpsynth status\n"


def test_curator_values_are_hidden_unless_asked_for() -> None:
    results = {"findings": 3, "accuracy": {"synthetic": 0.9}, "counts": {"train": 12}}
    where = Path("runs/x/curator/evaluation.json")
    hidden = opt.findings(results, where, show=False)
    assert hidden == {"findings": 3, "where": str(where)}
    assert shown_as.measures(hidden) == []
    shown = opt.findings(results, where, show=True)
    assert shown["counts"] == {"train": 12}
    assert shown_as.measures(shown)[0][1] == 0.9
    assert len(shown_as.measures(shown)[0]) == 4
    beside = shown | {"accuracy": {"synthetic": 0.9, "plain": 0.8, "ceiling": 0.95}}
    assert shown_as.measures(beside)[0][1:] == (0.9, 0.8, 0.95, None)
    table = shown_as.evaluation_text(beside).renderables[0]
    assert "without augmentation" in [c.header for c in table.columns]
    spread = {"accuracy": {"synthetic": 0.9, "interval": [0.88, 0.912], "ceiling": 0.95}}
    assert shown_as.measures(spread)[0][1:] == (0.9, "0.88 to 0.912", 0.95, None)
    assert opt.visible({"a": 1, "curator": {"loss": 2}}, show=False) == {"a": 1}
    assert opt.visible({"a": 1, "curator": {"loss": 2}}, show=True)["curator"] == {"loss": 2}
