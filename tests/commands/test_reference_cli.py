"""`dpsynth reference` as typed, and which private files it opens, and by which door."""

import json
import os
from pathlib import Path

import pytest
from clikit import python
from test_rooms_opened import PLAN, write_private

# Several command lines in one process, under an audit hook that sees who opens private files.
HARNESS = """
import contextlib, io, json, os, sys
private, report, lines = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
doors = os.path.join("dpsynth", "vault") + os.sep
opened = []

def watch(event, given):
    if event not in ("open", "os.listdir", "os.scandir"):
        return
    try:
        path = os.path.realpath(os.fsdecode(given[0]))
    except TypeError:
        return
    if path == private or path.startswith(private + os.sep):
        frame, files = sys._getframe(1), []
        while frame is not None:
            files.append(frame.f_code.co_filename)
            frame = frame.f_back
        opened.append([os.path.basename(path), any(doors in name for name in files)])

sys.addaudithook(watch)
import dpsynth.assess.domain as domain
import dpsynth.models.lenet as lenet
from dpsynth.cli import main
lenet.LEAST_STEPS = domain.STEPS = 2
found = []
for line in lines:
    sys.argv = ["dpsynth", *line]
    opened.clear()
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    found.append([code, out.getvalue(), err.getvalue(), list(opened)])
open(report, "w").write(json.dumps(found))
"""
LINES = {
    "plan": "plan plan.yaml --run run",
    "early": "reference run",
    "pretrain": "pretrain run",
    "reference": "reference run -n 20 --json",
    "again": "reference run -n 20",
    "pretrained": "reference run --kind pretrained -n 20",
    "unknown": "reference run --kind private",
    "evaluate": "evaluate run --samples curator/reference-nonprivate --json",
    "beside": "evaluate run --samples curator/reference-nonprivate --model prior",
    "nowhere": "evaluate run --samples curator/reference-nothing",
    "status": "status run --json",
}
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list]]:
    root = tmp_path_factory.mktemp("reference")
    write_private(root / "private")
    (root / "plan.yaml").write_text(PLAN.format(private=root / "private"))
    lines, report = json.dumps([line.split() for line in LINES.values()]), root / "report.json"
    done = python(HARNESS, os.path.realpath(root / "private"), report, lines, folder=root)
    assert report.exists(), done.stderr
    return root, dict(zip(LINES, json.loads(report.read_text()), strict=True))


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("reference", 0),
        ("again", 0),
        ("pretrained", 0),
        ("evaluate", 0),
        ("early", 6),
        ("unknown", 2),
        ("beside", 2),
        ("nowhere", 6),
    ],
)
def test_how_it_ends(story, line, code) -> None:
    found = story[1][line]
    assert found[0] == code, found[2]
    assert "Traceback" not in found[2]


def test_the_terminal_says_where_to_read_and_no_more(story) -> None:
    _, out, err, _ = story[1]["reference"]
    assert json.loads(out) == {
        "reference": "nonprivate",
        "count": 20,
        "where": "run/curator/reference-nonprivate",
        "contact_sheet": "run/curator/reference-nonprivate.png",
    }
    assert "never hand them out" in err
    assert "dpsynth evaluate run --samples curator/reference-nonprivate" in err
    evaluated = json.loads(story[1]["evaluate"][1])
    assert set(evaluated) == {"findings", "where"}
    assert evaluated["where"] == "run/curator/evaluation-of-reference-nonprivate.json"
    report = json.loads((story[0] / evaluated["where"]).read_text())
    assert report["samples"]["nonprivate_reference"] is True
    assert report["samples"]["count"] == 20


def test_private_files_are_opened_by_the_vault_alone(story) -> None:
    opened = story[1]["reference"][3]
    assert {name for name, _ in opened} >= {"train-images", "train-labels"}
    assert all(by_vault for _, by_vault in opened)


@pytest.mark.parametrize("line", ["plan", "pretrain", "again", "pretrained", "status"])
def test_what_needs_no_record_opens_none(story, line) -> None:
    """Also a reference of the public model, and one that is there already."""
    assert story[1][line][3] == []


def test_the_run_is_as_unspent_as_before(story) -> None:
    root, said = story
    assert not (root / "run/transcript.jsonl").exists()
    assert list((root / "run/released").iterdir()) == []
    assert not list(root.rglob("*ledger*"))
    assert json.loads(said["status"][1])["next"]


def test_private_paths_stay_in_the_curators_room(story) -> None:
    root, spelled = story[0], os.fsencode(story[0] / "private")
    shown = [path for path in (root / "run").rglob("*") if path.is_file()]
    assert not [
        path for path in shown if "curator" not in path.parts and spelled in path.read_bytes()
    ]


def test_the_docs_name_it() -> None:
    text = (ROOT / "docs" / "reference-runs.md").read_text()
    assert "dpsynth reference" in text
    assert "curator/reference-nonprivate" in text
