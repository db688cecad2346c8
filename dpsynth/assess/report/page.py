"""`curator/report.html`: one self-contained page of a run, for the curator alone."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpsynth.accounting.tradeoff import percent_up
from dpsynth.artifacts.files import write_atomic
from dpsynth.artifacts.lock import Lock
from dpsynth.artifacts.rooms import RunDir
from dpsynth.artifacts.samples import read_summary
from dpsynth.artifacts.transcript import Transcript, parse_transcript
from dpsynth.assess.report.facts import essentials, every_key
from dpsynth.assess.report.parts import Audited, Evaluated, audits, charged_scores, evaluations
from dpsynth.errors import typed
from dpsynth.planning import table
from dpsynth.planning.steps import Status, status
from dpsynth.released.card import build_card, charged_slots, spent, stamps
from dpsynth.released.card_page import CAPTIONS, SCORES, pictures
from dpsynth.released.page.chart import BarChart, bar_chart
from dpsynth.released.page.gallery import Gallery
from dpsynth.released.page.odds import odds_of
from dpsynth.released.page.prose import Section, sections
from dpsynth.released.page.render import number, render

NAME = "report.html"
TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Part:
    """A section of the page. `missing`: what it lacks; `command`: what to type for it."""

    id: str
    title: str
    missing: str = ""
    command: str = ""

    def to_json(self) -> dict[str, Any]:
        """The part as plain JSON values."""
        told = {"missing": self.missing, "command": self.command} if self.missing else {}
        return {"id": self.id, "title": self.title, "there": not self.missing, **told}


def report(run: RunDir) -> dict[str, Any]:
    """Write `curator/report.html` (mode 0600), and say which sections it has.

    Opens neither the plan file nor any private record: it shows what other commands wrote.

    Raises:
        MissingError: no plan was verified in this folder.
        ReplayError: lock or transcript do not hold.
    """
    found = status(run)
    run.make_rooms()
    html, parts = build_report(run, found)
    path = run.curator / NAME
    write_atomic(path, html.encode(), mode=0o600)
    path.chmod(0o600)
    return {
        "report": str(path),
        "bytes": len(html.encode()),
        "sections": [p.to_json() for p in parts],
    }


def build_report(run: RunDir, found: Status) -> tuple[str, list[Part]]:
    """The page's HTML, the same for the same run to the byte, and its sections in order."""
    lock = found.lock
    data = run.transcript.read_bytes() if run.transcript.is_file() else b""
    transcript = parse_transcript(data)
    slots = charged_slots(lock, transcript)
    odds = odds_of(lock, slots or lock.slots, planned=not slots)
    gallery = pictures(run, lock)
    measured, attacked = evaluations(run), audits(run)
    told = _told(lock, transcript, charged_scores(run, lock))
    parts = _parts(run, found, gallery, measured, attacked)
    values = {
        "title": f"{lock.facts['name']}: report of the run (curator only)",
        "name": lock.facts["name"],
        "stamps": [text for key, text in stamps(lock).items() if key != "dpsynth"],
        "public": bool(lock.facts["private"]["public"]),
        "key_figures": _key_figures(run, lock, transcript, odds.advantage, (measured, attacked)),
        "sections": parts,
        "next": found.next_command,
        "essentials": essentials(lock),
        "facts": every_key(lock.facts),
        "spent": [one for one in told if one.title != SCORES],
        "charged": [one for one in told if one.title == SCORES],
        "bars": _bars(lock),
        "planned": [
            [number(cell) if cell != "" else "" for cell in row] for row in table.rows(lock)
        ],
        "columns": table.COLUMNS,
        "odds": odds,
        "gallery": gallery,
        "evaluations": measured,
        "audits": attacked,
        "plan_hash": lock.plan_hash,
        "head": transcript.head if transcript.lines else "",
    }
    return render("report.html", values, folder=TEMPLATES), parts


def _parts(
    run: RunDir,
    found: Status,
    gallery: Gallery,
    measured: list[Evaluated],
    attacked: list[Audited],
) -> list[Part]:
    """The sections, each with what it lacks."""
    root = run.root
    spend = "" if found.state.charged else "Nothing was spent yet; below is what is planned."
    pictured = "" if gallery.drawn else "No images were drawn yet."
    evaluated = "" if measured else "The samples were not measured yet."
    tried = "" if attacked else "The plan was not attacked yet."
    following = found.next_command or ""
    return [
        Part("plan", "Plan"),
        Part("spend", "Spend by mechanism", spend, following if spend else ""),
        Part("odds", "What epsilon means for an attacker"),
        Part("pictures", "Pictures", pictured, typed("dpsynth", "sample", root)),
        Part("evaluation", "Evaluation", evaluated, typed("dpsynth", "evaluate", root)),
        Part("audit", "Audit", tried, typed("dpsynth", "audit", root, "--quick")),
        Part("every-key", "The plan in full"),
    ]


def _told(lock: Lock, transcript: Transcript, scores: dict[str, Any] | None) -> list[Section]:
    """What the card says of the guarantee, the mechanisms and a charged evaluation."""
    card = build_card(lock, transcript, {}, [], scores)
    return [one for one in sections(card, CAPTIONS) if one.title in ("Guarantee", *CAPTIONS)]


def _cell(value: object) -> str:
    return "" if value == "" else number(value)


def _bars(lock: Lock) -> BarChart:
    alone = {stage: float(row["epsilon_alone"]) for stage, row in lock.by_stage.items()
             if "epsilon_alone" in row}  # fmt: skip
    return bar_chart(alone, lock.epsilon, float(lock.budget["epsilon"]))


def _key_figures(
    run: RunDir,
    lock: Lock,
    transcript: Transcript,
    advantage: float | None,
    found: tuple[list[Evaluated], list[Audited]],
) -> list[dict[str, str]]:
    """What one looks for first."""
    budget, summary = lock.budget, read_summary(run.released / "samples")
    total = f"of {number(budget['epsilon'])}, delta {number(budget['delta'])}"
    measured, attacked = found
    most = "–" if advantage is None else percent_up(advantage)
    verdicts = {one.found.passed for one in attacked if one.found}
    passed = "FAILED" if False in verdicts else "passed" if verdicts == {True} else "–"
    figures = [
        ("epsilon spent", number(spent(lock, transcript)), total),
        ("membership advantage", most, "at most, of any attacker"),
        ("synthetic images", number(summary["count"] if summary else 0), ""),
        *(_first_values(measured)),
        ("audit", passed, "" if attacked else "not run"),
    ]
    return [{"name": name, "value": value, "more": more} for name, value, more in figures]


def _first_values(measured: list[Evaluated]) -> list[tuple[str, str, str]]:
    """Two measures of the plan's own samples, where there are some."""
    found = [("accuracy", "–", "not measured"), ("Frechet distance", "–", "not measured")]
    tables = measured[0].measured.tables if measured else []
    rows = {row[0].text: row for one in tables[:1] for row in one.rows}
    columns = tables[0].columns[1:] if tables else ()
    for place, (name, _, _) in enumerate(found):
        row = next((row for text, row in rows.items() if text.startswith(name)), None)
        if row is not None:
            said = dict(zip(columns, (cell.text for cell in row[1]), strict=True))
            more = ", ".join(f"{c} {said[c]}" for c in ("ceiling", "floor") if c in said)
            found[place] = (name, said.get("synthetic", "–"), more)
    return found
