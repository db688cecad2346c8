"""An evaluation's and an audit's report as tables: every value in its place, nothing required."""

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from reports import audit as audit_report
from reports import evaluation

from dpsynth.assess.report.audits import audit
from dpsynth.assess.report.facts import _essentials
from dpsynth.assess.report.measures import Measures, measures
from dpsynth.assess.report.tables import Table

OLD = {
    "format": "dpsynth-evaluation-1",
    "accuracy": {"synthetic": 0.9, "plain": 0.8, "ceiling": 0.97, "floor": 0.1},
    "frechet": {"synthetic": 93.7, "ceiling": 6.2, "floor": 472.2, "relative": 0.198},
    "label_consistency": 0.9555,
    "features": {"name": "lenet-84", "n_synthetic": 2000, "width": 84},
    "inception": {"fid": None, "note": "left blank"},
    "notes": ["a note"],
}


def rows(table: Table) -> dict[str, dict[str, tuple[str, str]]]:
    return {
        head.text: dict(zip(table.columns[1:], ((c.text, c.small) for c in cells), strict=True))
        for head, cells in table.rows
    }


def by_caption(found: Measures, start: str) -> Table:
    return next(table for table in found.tables if table.caption.startswith(start))


def test_measures_with_their_intervals() -> None:
    found = measures(evaluation())
    main = rows(by_caption(found, "Measured on held-out records."))
    assert main["accuracy of a small probe"] == {
        "synthetic": ("0.9133", "0.89 to 0.93"), "ceiling": ("0.9727", ""), "floor": ("0.116", "")
    }  # fmt: skip
    assert main["Frechet distance"]["synthetic"] == ("93.72", "80 to 107.5")
    assert main["Frechet distance inside a class"]["synthetic"] == ("–", "")
    assert "n" not in main
    assert "probe spread" not in main
    heads = {head.text: head.small for head, _ in found.tables[0].rows}
    assert heads["Frechet distance"] == "lower is better · relative 0.198 · unbiased 92.1"
    assert "2,000 synthetic" in found.tables[0].caption


def test_confusion_and_classes() -> None:
    found = measures(evaluation())
    matrix = by_caption(found, "Accuracy of a small probe: a row for each true class")
    assert matrix.columns == ("true class", "zero", "one", "two")
    assert rows(matrix)["zero"]["zero"] == ("40", "")
    assert matrix.heat[0][0] == 40 / 44
    classes = by_caption(found, "Accuracy of a small probe, by class.")
    assert classes.columns[:4] == ("class", "records", "recall", "precision")
    assert rows(classes)["two"]["recall"] == ("0.9", "")
    frechet = by_caption(found, "Frechet distance inside a class, by class.")
    assert rows(frechet)["two"] == {"synthetic": ("12", ""), "ceiling": ("12", "")}


def test_copy_check_notes_and_pictures() -> None:
    found = measures(evaluation())
    copies = by_caption(found, "Copy check: clean: no sample is nearer. Samples that equal a ")
    assert copies.columns == ("copy check", "pixels", "features")
    assert {name: row["pixels"] for name, row in rows(copies).items()} == {
        "verdict": ("clean", ""),
        "samples that are copies": ("0", "of 2,000"),
        "samples near to training records": ("1%", "0.6% to 1.55%; 1% by chance"),
        "lowest score of a sample": ("0.7", "–"),
        "as many near ones by chance": ("0.4", ""),
    }
    assert not any("opy check" in note for note in found.notes)
    assert "few images: a doubt" in found.notes
    assert "Inception FID left blank" in found.notes
    assert found.methods == [
        ("interval: accuracy of a small probe, Frechet distance", "percentile bootstrap of records")
    ]
    assert found.pictures == ["elsewhere/curator/evaluation.png", "somewhere/curator/copies.png"]


def test_a_copy_check_that_judged_nothing_has_dashes() -> None:
    report = evaluation()["copies"]
    blank = dict.fromkeys(("close_share", "interval", "expected_share", "p_value"))
    space = report["spaces"][0] | blank | {"verdict": "not judged", "space": "lenet-84 (of 9)"}
    (table,) = measures({"copies": report | {"verdict": "not judged", "spaces": [space]}}).tables
    assert table.columns[1] == "lenet-84"
    assert rows(table)["samples near to training records"]["lenet-84"] == ("–", "")
    odd = measures({"copies": report | {"spaces": [{"space": 3}]}})
    assert [t.caption for t in odd.tables] == ["Copy check: spaces."]


def test_diversity_by_class_stands_beside_the_real_records() -> None:
    by_class = {"zero": 1.0, "one": 2.0, "two": None}
    found = measures(
        {
            "classes": ["zero", "one", "two"],
            "diversity": {
                "synthetic": 1.5, "by_class": by_class, "ceiling_by_class": by_class | {"two": 3.0}
            },
        }
    )  # fmt: skip
    table = rows(by_caption(found, "Diversity inside a class, by class."))
    assert table["two"] == {"synthetic": ("–", ""), "ceiling": ("3", "")}


def test_a_value_that_is_absent_says_why_where_it_stands() -> None:
    blank = {"synthetic": None, "note": "needs more than 84 images"}
    (table,) = measures({"per_class_frechet": blank, "recall": {"synthetic": None}}).tables
    heads = {head.text: head.small for head, _ in table.rows}
    assert heads["Frechet distance inside a class"].endswith("needs more than 84 images")
    assert heads["recall"].endswith("a note below says why")


def test_a_draw_from_the_release_takes_no_steps_of_a_flow() -> None:
    sampling = {"method": "release", "count": 2000, "steps": 25, "guidance": 1.5, "sharpen": 0.5}
    facts = {"sampling": sampling, "split": "noise"}
    budget = {"epsilon": 3.0, "delta": 1e-5, "adjacency": "add-or-remove-one", "unit": "record"}
    said = dict(_essentials(facts, budget))["sampling"]
    assert said == "release, count 2,000, sharpen 0.5"
    flow = {"sampling": sampling | {"method": "flow"}}
    assert "steps 25, guidance 1.5" in dict(_essentials(flow, budget))["sampling"]


def test_an_older_report() -> None:
    found = measures(OLD)
    main = rows(found.tables[0])
    assert main["accuracy of a small probe"]["without augmentation"] == ("0.8", "")
    assert main["label consistency"]["synthetic"] == ("0.9555", "")
    assert main["label consistency"]["floor"] == ("–", "")
    assert found.notes == ["a note", "left blank"]


def test_measures_that_are_absent_have_no_row() -> None:
    assert measures({}).tables == []
    only = measures({"recall": {"synthetic": 0.5}})
    assert only.tables[0].columns == ("measure", "synthetic")
    assert len(only.tables[0].rows) == 1


def test_an_audit_that_passed_and_one_that_did_not() -> None:
    passed, failed = audit(audit_report()), audit(audit_report(leak=True))
    assert (passed.passed, failed.passed) == (True, False)
    assert passed.head.startswith("PASS.")
    assert failed.head.startswith("FAIL:")
    assert ("noise left out: seen by canaries",) in passed.blocks
    table = next(t for t in failed.tables if t.caption.startswith("What each attack saw"))
    (head, cells), *others = table.rows
    assert (head.text, head.small) == ("gradient canaries", "plan")
    assert [(cell.text, cell.small) for cell in cells] == [
        ("5.5", "promised 3"), ("0.52", "0.45 to 0.59"), ("0.04", "0.01 to 0.1"),
        ("38", "of 50 guesses"),
    ]  # fmt: skip
    assert others[0][0].small == "planted: no-noise"
    assert ("canaries", "200") in passed.facts


def test_an_audit_without_a_verdict() -> None:
    for report in ({}, {"verdict": None}, {"verdict": "seen"}, {"verdict": {"passed": "?"}}):
        assert audit(report).passed is None


_KEYS = ["accuracy", "attacks", "classes", "notes", "verdict", "x"]
_INNER = [
    "synthetic", "interval", "classes", "confusion", "notes", "by_class", "features",
    "interval_how", "verdict", "text", "control", "bound", "a",
]  # fmt: skip
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**9) | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(_INNER), inner, max_size=4)
    ),
    max_leaves=25,
)


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["accuracy", "attacks", "classes", "notes", "verdict", "x"]), _JSON
    )
)
def test_no_report_is_too_odd(report: dict[str, Any]) -> None:
    for found in (measures(report).tables, audit(report).tables):
        for table in found:
            assert all(len(cells) == len(table.columns) - 1 for _, cells in table.rows)
            if table.heat:
                assert [len(row) for row in table.heat] == [len(cells) for _, cells in table.rows]
                assert all(0 <= share <= 1 for row in table.heat for share in row)


def test_real_reports_are_json() -> None:
    assert json.loads(json.dumps(evaluation())) == evaluation()
