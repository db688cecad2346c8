"""`dpsynth compare`: runs of several plans on the same private records, in one table and figure.

Every run lies where `dpsynth run` would put it, beside all others of its dataset, so that one
ledger adds their budgets up. The comparison's own folder holds what was measured, and the plans
that were derived: mode 0700, for the curator alone.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dpsynth.artifacts.files import (
    read_json,
    sha256_bytes,
    storage_error,
    write_atomic,
    write_changed,
    write_json,
)
from dpsynth.artifacts.ledger import Ledger
from dpsynth.artifacts.manifest import NAME as MANIFEST
from dpsynth.artifacts.rooms import LOCK_NAME
from dpsynth.assess.comparison.derived import stem_of
from dpsynth.assess.comparison.entrants import RUNS, Entrant, gathered, labels
from dpsynth.assess.comparison.equal import entries_of, require_allowed, require_equal, spent_on
from dpsynth.assess.comparison.figure import draw
from dpsynth.assess.comparison.page import build_page
from dpsynth.assess.comparison.results import result_of
from dpsynth.assess.comparison.rows import bounds_of, notes_of, rows_of
from dpsynth.console import note
from dpsynth.errors import MissingError, UsageError, typed
from dpsynth.planning.steps import status
from dpsynth.planning.units import unit_words
from dpsynth.planning.verify import VerifiedPlan, load_verified, make_run
from dpsynth.planning.yaml_plan import load_plan

FORMAT = "dpsynth-comparison-1"
REPORT, PAGE, FIGURE = "comparison.json", "comparison.html", "comparison.png"
PLANS, TIMES = "plans", "times.json"
_MODE = 0o600
_LONG = 60

CarryOut = Callable[[VerifiedPlan], VerifiedPlan]


def compare(
    given: Sequence[Path],
    out: Path | None = None,
    *,
    epsilons: Sequence[float] = (),
    repeat: int = 1,
    private: Path | None = None,
    carry_out: CarryOut | None = None,
) -> dict[str, Any]:
    """Run what is not finished, and write one table and one figure of all; curator-only.

    Everything is read and held against each other before the first run is planned, and everything
    is planned before the first is carried out. Called again, it goes on where it ended.

    Args:
        given: plan files and run folders.
        out: the comparison's folder; None: `runs/comparison-NAMES`.
        epsilons: at which plan files are taken, in place of their own.
        repeat: runs of each plan file and epsilon: NAME-1, NAME-2 ...
        private: where the private records lie now.
        carry_out: does all steps of a run; None: nothing is run, and unfinished runs are left out.

    Returns:
        The report as written.

    Raises:
        UsageError: what is given cannot be compared, or the folder is not the comparison's.
        BudgetError: the runs' budgets may not add up.
        MissingError: nothing is finished, of a comparison that runs nothing.
        DpsynthError: as of `dpsynth run`, of any run.
    """
    epsilons = list(dict.fromkeys(epsilons))
    folder = out or default_folder(given)
    _require_own(folder)
    entrants = gathered(
        given, epsilons=epsilons, repeat=repeat, folder=folder / PLANS, private=private
    )
    require_equal(entrants)
    if carry_out is None:
        entrants = _finished(entrants)
    else:
        require_allowed(entrants)
        _make(folder)
        _carry_out_all(entrants, folder, private, carry_out)
    _make(folder)
    return _write(entrants, folder)


def default_folder(given: Sequence[Path]) -> Path:
    """Where a comparison lies unless it is said: `runs/comparison-` and what is compared.

    Raises PlanError where a plan cannot be read.
    """
    names = [stem_of(p.resolve().name if p.is_dir() else load_plan(p).name) for p in given]
    text = "-".join(dict.fromkeys(names))
    if len(text) > _LONG:
        text = f"{text[: _LONG - 9]}-{sha256_bytes(text.encode())[:8]}"
    return RUNS / f"comparison-{text}"


def _finished(entrants: Sequence[Entrant]) -> list[Entrant]:
    """The runs that are done, of the same plan as now; the others are named."""
    done = []
    for one in entrants:
        if not one.finished:
            note(f"{one.name}: not finished, left out")
            continue
        one.require_same_plan()
        done.append(one)
    if not done:
        raise MissingError(
            "none of these runs is finished", hint="leave --no-run out, and they are carried out"
        )
    return done


def _carry_out_all(
    entrants: Sequence[Entrant], folder: Path, private: Path | None, carry_out: CarryOut
) -> None:
    """Plan every run that is not finished, then carry out one after the other."""
    for one in entrants:
        if one.derived is not None:
            write_changed(one.derived.path, one.derived.text.encode())
            one.derived.path.chmod(_MODE)
    planned: list[tuple[Entrant, VerifiedPlan | None]] = []
    for one in entrants:
        if one.finished:
            one.require_same_plan()
            planned.append((one, None))
        else:
            planned.append((one, _verified(one, private)))
    others = list(entrants)
    for place, (one, verified) in enumerate(planned, start=1):
        if verified is None:
            note(f"{one.name}: finished already")
            continue
        note(f"{one.name} ({place} of {len(planned)}):")
        _carry_out(one, others, folder, verified, carry_out)


def _verified(one: Entrant, private: Path | None) -> VerifiedPlan:
    if one.plan_file is None:
        return load_verified(one.run.root, private)
    return make_run(one.plan_file, one.run.root, private=private)


def _carry_out(
    one: Entrant,
    others: Sequence[Entrant],
    folder: Path,
    verified: VerifiedPlan,
    carry_out: CarryOut,
) -> None:
    from dpsynth.assess.comparison.sharing import share
    from dpsynth.released.handout import hand_out

    with _timed(folder / TIMES, one) as told:
        taken = share(one, [other for other in others if other.run.root != one.run.root])
        if taken is not None:
            note(f"public files: taken from {taken}, as far as they fit")
            told["public_files_of"] = taken
        carry_out(verified)
        hand_out(one.run)


@contextmanager
def _timed(path: Path, one: Entrant) -> Iterator[dict[str, Any]]:
    """Add the block's seconds to what is known of a run, also where it is cut off.

    A run that something else began before has no seconds: they would be of a part of it.
    """
    known = read_json(path) if path.is_file() else {}
    own: dict[str, Any] = known.get(one.name, {})
    if not own and any(s.done for s in status(one.run).steps if s.name != "plan"):
        own = {"seconds": None}
    start = time.perf_counter()
    try:
        yield own
    finally:
        if own.get("seconds", 0.0) is not None:
            own["seconds"] = own.get("seconds", 0.0) + time.perf_counter() - start
        write_json(path, {**known, one.name: own}, mode=_MODE)


def _write(entrants: Sequence[Entrant], folder: Path) -> dict[str, Any]:
    """Read every run, and write report, figure and page."""
    from dpsynth.assess.measured import CURATOR, MAY_GO  # torch enters here, not in refusals

    times = read_json(folder / TIMES) if (folder / TIMES).is_file() else {}
    named = labels(entrants)
    runs = [result_of(one, named[one.run.root], times.get(one.name, {})) for one in entrants]
    rows, bounds, public = rows_of(runs), bounds_of(runs), entrants[0].public
    png = draw(rows, bounds, _title(entrants), "public" if public else "curator-only")
    report = {
        "format": FORMAT,
        "room": "public" if public else "curator",
        "who_may_see_it": MAY_GO if public else CURATOR,
        "private_source_declared_public": public,
        "common": _common(entrants[0]),
        "rows": rows,
        "bounds": bounds,
        "runs": runs,
        "ledgers": _ledgers(entrants),
        "notes": notes_of(runs),
        "findings": sum(len(row["measures"]) for row in rows),
        "page": str(folder / PAGE),
        "figure": None if png is None else str(folder / FIGURE),
    }
    if png is None:
        (folder / FIGURE).unlink(missing_ok=True)
    else:
        write_atomic(folder / FIGURE, png, mode=_MODE)
    write_atomic(folder / PAGE, build_page(report, png).encode(), mode=_MODE)
    write_json(folder / REPORT, report, mode=_MODE)
    return report


def _title(entrants: Sequence[Entrant]) -> str:
    source = entrants[0].facts["private"]["source"]["kind"]
    return f"methods at equal budgets, private source: {source}"


def _common(one: Entrant) -> dict[str, Any]:
    private, image = one.facts["private"], one.facts["private"]["image"]
    held_out = private["held_out"]
    return {
        "private source": private["source"]["kind"],
        "declared capacity": private["capacity"],
        "image": [image["height"], image["width"], image["channels"]],
        "classes": list(private["classes"]),
        "held out by": held_out["by"],
        "held-out fraction": held_out.get("fraction"),
        "delta": one.budget["delta"],
        "unit of privacy": unit_words(one.budget["unit"]),
        "probe epochs": one.facts["evaluation"]["probe_epochs"],
    }


def _ledgers(entrants: Sequence[Entrant]) -> list[dict[str, Any]]:
    """What all runs on the records may spend together, by ledger: one for each folder of runs."""
    found = dict.fromkeys(Ledger.beside(one.run.root, one.places[0]) for one in entrants)
    if len(found) > 1:
        note("the runs lie in several folders: each has a ledger of its own, and they add up")
    return [{"runs": len(entries_of(ledger)), **spent_on(ledger)} for ledger in found]


def _require_own(folder: Path) -> None:
    """Refuse a folder that others see, or that holds something else than a comparison."""
    for place in (folder.absolute(), folder.resolve()):
        for room in (place, *place.parents):
            if (room / LOCK_NAME).is_file() or (room / MANIFEST).is_file():
                raise UsageError(
                    f"{folder} lies in a run's folder or a hand-out, where a comparison does not "
                    "belong",
                    hint=typed("dpsynth", "compare", "PLAN...", "--out", "runs/comparison-NAME"),
                )
    own = {REPORT, PLANS, TIMES}
    if folder.exists() and (
        not folder.is_dir()
        or (any(folder.iterdir()) and not own & {path.name for path in folder.iterdir()})
    ):
        raise UsageError(
            f"{folder} is there already, and holds no comparison",
            hint="--out DIR that is not there yet",
        )


def _make(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        (folder / PLANS).mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise storage_error(folder, error) from error
