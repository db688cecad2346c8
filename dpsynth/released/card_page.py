"""`released/card.html`: the card of a hand-out folder as one page, with pictures and the odds.

Built wherever `card.md` is built, from the lock, the transcript and what lies in `released/`; its
words are the card's own. Nothing of the curator's room can come in: the folder is all it is given.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpsynth.accounting.tradeoff import percent_up
from dpsynth.artifacts.lock import Lock
from dpsynth.artifacts.rooms import RunDir
from dpsynth.artifacts.transcript import Transcript
from dpsynth.planning.schema import Plan
from dpsynth.planning.units import unit_words
from dpsynth.released.card import build_card, charged_slots, spent, stamps
from dpsynth.released.page.gallery import Gallery, HandOut, gallery
from dpsynth.released.page.odds import Odds, odds_of
from dpsynth.released.page.pictures import png_file
from dpsynth.released.page.prose import Section, sections
from dpsynth.released.page.render import number, render

NAME = "card.html"
MATRIX = "confusion.png"
SCORES = "Charged evaluation"
CAPTIONS = {
    "Epsilon by mechanism": (
        "What each mechanism was charged for. Epsilon of a mechanism alone; all of them together "
        "compose to the epsilon spent.",
        "Time buckets of the training steps, each with its own clip.",
    ),
    SCORES: ("Scores of each class, with one standard error of noise and sampling.",),
}
ODDS, PICTURES = "What epsilon means for an attacker", "Pictures"
_BEFORE = "What the adversary sees"


def build_card_page(
    lock: Lock,
    transcript: Transcript,
    samples: dict[str, dict[str, Any]],
    files: Sequence[str] = (),
    evaluation: dict[str, Any] | None = None,
    *,
    folder: Path,
) -> str:
    """The page's HTML: the same for the same folder, to the byte.

    `samples`, `files`, `evaluation` as of `build_card`; `folder`: the hand-out, whose pictures are
    shown.
    """
    odds = odds_of(lock, charged_slots(lock, transcript))
    said = sections(build_card(lock, transcript, samples, files, evaluation), CAPTIONS)
    return render(
        "card.html",
        {
            "title": f"{lock.facts['name']}: card",
            "name": lock.facts["name"],
            "stamps": [text for key, text in stamps(lock).items() if key != "dpsynth"],
            "key_figures": _key_figures(lock, transcript, samples, odds),
            "sections": _placed(said),
            "matrix": png_file(folder / MATRIX) if evaluation is not None else None,
            "scores": SCORES,
            "odds": odds,
            "gallery": pictures(HandOut(folder), lock),
        },
    )


def pictures(run: RunDir, lock: Lock) -> Gallery:
    """The gallery of a run; empty, with a note, for a plan that this version cannot read."""
    try:
        plan = Plan.of_facts(lock.facts)
    except ValueError:
        return Gallery((), ("This version of dpsynth cannot read the plan.",), 0, 0, 1, 1)
    return gallery(run, plan, stamps(lock))


def _placed(said: list[Section]) -> list[dict[str, Any]]:
    """The card's sections, with those of this page in their places."""
    own = [
        {"title": title, "id": f"page-{kind}", "kind": kind, "body": ""}
        for kind, title in (("odds", ODDS), ("pictures", PICTURES))
    ]
    prose = [{"title": one.title, "id": one.id, "kind": "prose", "body": one.body} for one in said]
    titles = [one.title for one in said]
    place = titles.index(_BEFORE) if _BEFORE in titles else len(prose)
    return [*prose[:place], *own, *prose[place:]]


def _key_figures(
    lock: Lock, transcript: Transcript, samples: dict[str, dict[str, Any]], odds: Odds
) -> list[dict[str, str]]:
    """What one looks for first."""
    budget, images = lock.budget, samples.get("samples", {}).get("count", 0)
    unit = unit_words(budget["unit"])
    figures = [
        ("epsilon spent", number(spent(lock, transcript)), f"of {number(budget['epsilon'])}"),
        ("delta", number(budget["delta"]), ""),
        ("protects", f"one {unit}", budget["adjacency"].replace("-", " ")),
        ("declared number", number(lock.facts["private"]["capacity"]), f"{unit}s, not counted"),
        ("synthetic images", number(images), ""),
    ]
    if odds.advantage is not None:
        figures.append(("membership advantage", percent_up(odds.advantage), "at most"))
    return [{"name": name, "value": value, "more": more} for name, value, more in figures]
