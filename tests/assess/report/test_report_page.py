"""`dpsynth report`: one page of a run, complete or not, for the curator alone."""

import json
from pathlib import Path

import numpy as np
import pytest
from browserkit import look
from clikit import typed
from pagekit import EVIL, Page, finished, planned, require_inert
from reports import audit, evaluation, of_these_samples, put

from dpsynth.artifacts.sheet import encode_png
from dpsynth.assess.report.page import NAME, report
from dpsynth.planning.verify import VerifiedPlan

IDS = ["plan", "spend", "odds", "pictures", "evaluation", "audit", "every-key"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> VerifiedPlan:
    """A finished run with an evaluation, an audit and their pictures."""
    made = finished(tmp_path_factory.mktemp("report"), EVIL)
    put(made.run, "evaluation.json", of_these_samples(made.run, evaluation(list(EVIL))))
    put(made.run, "audit/audit.json", audit())
    picture = encode_png(np.zeros((300, 1500, 3), np.uint8), {})
    for name in ("evaluation.png", "copies.png", "audit/audit.png"):
        (made.run.curator / name).write_bytes(picture)
    return made


def page_of(run: VerifiedPlan) -> tuple[str, Page]:
    found = report(run.run)
    html = Path(found["report"]).read_text()
    return html, require_inert(html)


def words(page: Page) -> str:
    return " ".join(page.text.split())


def test_a_whole_run(run: VerifiedPlan) -> None:
    found = report(run.run)
    assert [(part["id"], part["there"]) for part in found["sections"]] == [(i, True) for i in IDS]
    _, page = page_of(run)
    text = words(page)
    for said in (
        "Never hand this page out",
        "epsilon spent", "membership advantage",
        "add or remove one record", "private.capacity",
        "noise / sensitivity", "Members found at most",
        "accuracy of a small probe", "0.89 to 0.93", "Copy check: clean",
        "PASS. No attack saw", "What each attack saw", "How it was measured",
    ):  # fmt: skip
        assert said in text, said
    assert "changed since they were measured" not in text
    assert len(page.all("img")) == 4 * (1 + 9) + 3
    for name in EVIL:
        assert name in page.text


def test_it_stays_in_the_closed_room(run: VerifiedPlan) -> None:
    path = Path(report(run.run)["report"])
    assert path == run.run.curator / NAME
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_the_same_run_gives_the_same_bytes(run: VerifiedPlan) -> None:
    assert page_of(run)[0] == page_of(run)[0]


def test_tables_have_headings_for_rows_and_columns(run: VerifiedPlan) -> None:
    page = page_of(run)[1]
    assert all(th.get("scope") in {"row", "col"} for th in page.all("th"))


def test_a_moved_run_finds_its_pictures_and_no_others(run: VerifiedPlan, tmp_path: Path) -> None:
    """A report may name any file: only PNGs of this run's own room come onto the page."""
    outside = tmp_path / "outside.png"
    outside.write_bytes(encode_png(np.full((3, 3, 1), 7, np.uint8), {}))
    (run.run.curator / "secret.png").write_text("no picture")
    named = evaluation(list(EVIL)) | {
        "extra": {"a": str(outside), "b": "curator/../../outside.png", "c": "curator/secret.png"}
    }
    put(run.run, "evaluation.json", of_these_samples(run.run, named))
    assert len(page_of(run)[1].all("img")) == 4 * (1 + 9) + 3


def test_samples_that_were_drawn_anew_are_said_to_be(run: VerifiedPlan) -> None:
    put(run.run, "evaluation.json", evaluation(list(EVIL)))
    assert "changed since they were measured" in words(page_of(run)[1])


def test_a_failed_audit_is_loud(run: VerifiedPlan) -> None:
    put(run.run, "audit/audit.json", audit(leak=True))
    page = page_of(run)[1]
    assert "FAILED" in page.text
    assert "FAIL: an attack saw more" in page.text
    put(run.run, "audit/audit.json", audit())


def test_an_audit_on_public_data_stands_beside_the_other(run: VerifiedPlan) -> None:
    path = put(run.run, "audit-public-data/audit.json", audit())
    page = page_of(run)[1]
    assert page.text.count("PASS. No attack saw") == 2
    assert "With public images in their place (curator/audit-public-data)" in page.text
    assert "With the private records (curator/audit)" in page.text
    path.unlink()


def test_damaged_reports_are_named_and_the_rest_is_shown(run: VerifiedPlan) -> None:
    (run.run.curator / "evaluation.json").write_text("{")
    (run.run.curator / "audit" / "audit.json").write_text("[1]")
    text = words(page_of(run)[1])
    assert "evaluation.json is damaged" in text
    assert "audit.json is damaged" in text
    assert "Spend by mechanism" in text


def test_a_run_that_has_only_a_plan(tmp_path: Path) -> None:
    verified = planned(tmp_path, ["a", "b"], public=True)
    found = report(verified.run)
    missing = {part["id"]: part["command"] for part in found["sections"] if not part["there"]}
    root = verified.run.root
    assert missing["pictures"] == f"dpsynth sample {root}"
    assert missing["evaluation"] == f"dpsynth evaluate {root}"
    assert missing["audit"] == f"dpsynth audit {root} --quick"
    assert missing["spend"].startswith("dpsynth ")
    page = require_inert(Path(found["report"]).read_text())
    text = words(page)
    for command in missing.values():
        assert command in text
    for said in ("Nothing was spent yet", "If everything planned is spent", "PUBLIC DEMO"):
        assert said in text


def test_the_command_line(tmp_path: Path) -> None:
    verified = planned(tmp_path, ["a", "b"])
    put(verified.run, "evaluation.json", {"accuracy": {"synthetic": 0.8765}})
    done, said, lost = typed(tmp_path, "report run --json", "report run", "report nowhere")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["report"] == "run/curator/report.html"
    assert [part["id"] for part in found["sections"]] == IDS
    assert "0.8765" not in done.out + done.err + said.out  # measured values stay on the page
    assert "0.8765" in (tmp_path / found["report"]).read_text()
    assert "report: run/curator/report.html   (curator only)" in said.out
    assert "Type: dpsynth audit run --quick" in said.err
    assert lost.code == 6
    assert "dpsynth plan" in lost.err


@pytest.mark.parametrize("width", [390, 1200])
def test_it_fits_a_phone_and_a_desk(run: VerifiedPlan, tmp_path: Path, width: int) -> None:
    put(run.run, "evaluation.json", of_these_samples(run.run, evaluation(list(EVIL))))
    put(run.run, "audit/audit.json", audit())
    path = Path(report(run.run)["report"])
    seen = look(path, width, tmp_path)
    assert (seen.width, seen.needed, seen.wide) == (width, width, [])
    assert (seen.images, seen.broken, seen.scripts) == (43, 0, 0)
    assert seen.headings[0] == 1
    assert all(b - a <= 1 for a, b in zip(seen.headings, seen.headings[1:], strict=False))
