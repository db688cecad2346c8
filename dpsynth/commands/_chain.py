"""The steps of `dpsynth run`, in order, each skipped where it is finished."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from dpsynth.commands import _options as opt
from dpsynth.console import counted, note

if TYPE_CHECKING:
    from rich.console import Group

    from dpsynth.planning.steps import Status
    from dpsynth.planning.verify import VerifiedPlan
    from dpsynth.private.engine import EngineSettings

    Engine = Callable[[], EngineSettings]

Work = Callable[["VerifiedPlan"], object]


def carry_out(verified: "VerifiedPlan", engine: "Engine") -> "VerifiedPlan":
    """Do every step of the plan that is not done yet; a later call goes on where this one ended.

    `engine`: gives how private training computes; asked once torch may be loaded. Returns the plan
    as it is verified by now: one with time buckets is planned again after `pretrain`.
    """
    from dpsynth.planning.steps import status
    from dpsynth.planning.verify import VerifiedPlan

    fresh = False
    for name, work in _steps(engine):
        before = status(verified.run)
        step = before.step(name)
        if step is None:
            continue
        if step.done and not fresh and not _looks_itself(name, before):
            note(f"{name}: done already")
            continue
        note(f"{name}:")
        made = work(verified)
        if isinstance(made, VerifiedPlan):  # planned again: later steps go by the new lock
            verified = made
        fresh = fresh or name not in {"check", "pretrain", "allocate"}
    return verified


def _looks_itself(name: str, status: "Status") -> bool:
    """Whether a step that seems done is asked again, for it knows best what still holds.

    Until the transcript opens, the plan's public part may change; until it closes, the records.
    """
    if name == "pretrain":
        return status.state.run_id is None
    return name == "check" and not status.state.closed


def _steps(engine: "Engine") -> Iterator[tuple[str, Work]]:
    """Each step's library function; torch enters with the first that needs it."""
    from dpsynth.assess.check import ensure_checked
    from dpsynth.public.pretrain import pretrain

    yield "check", ensure_checked
    yield "pretrain", pretrain

    from dpsynth.planning.verify import allocate

    yield "allocate", allocate

    from dpsynth.private.dpsgd import train
    from dpsynth.private.moments import release_moments
    from dpsynth.released.distill import distill

    yield "release-moments", release_moments
    yield "distil", distill
    yield "train", lambda verified: train(verified, engine=engine())
    yield "close", _close

    from dpsynth.assess.evaluate import evaluate
    from dpsynth.released.sampling import sample

    yield "sample", sample
    yield "evaluate", evaluate


def _close(verified: "VerifiedPlan") -> None:
    from dpsynth.artifacts.spending import close_run

    close_run(verified.run, verified.lock)


def summary(verified: "VerifiedPlan", show: bool) -> dict[str, Any]:
    """What a finished run amounts to; measured values only if `show`."""
    from dpsynth.artifacts.files import read_json
    from dpsynth.planning import table
    from dpsynth.planning.replay import replay
    from dpsynth.released.handout import hand_out

    run = verified.run
    hand_out(run)
    where = run.curator / "evaluation.json"
    evaluation = read_json(where)
    return {
        "run": str(run.root),
        **table.as_json(verified.lock),
        "evaluation": opt.findings(evaluation, where, show),
        "contact_sheet": str(run.released / "contact-sheet.png"),
        "beside_real": str(evaluation["sheet"]),
        "released": str(run.released),
        "replay": replay(run.released).to_json(),
    }


def summary_text(verified: "VerifiedPlan", found: dict[str, Any]) -> "Group":
    """The summary for people: spent by mechanism, measured, and where to look."""
    from rich.console import Group
    from rich.text import Text

    from dpsynth.planning import table as budget_table

    lines = [
        f"synthetic images: {found['contact_sheet']}",
        f"beside real ones: {found['beside_real']}   (curator only)",
        f"hand out:         {found['released']}",
        f"replay:           {found['replay']['verdict']}",
    ]
    spent = budget_table.render(verified.lock, str(verified.run.lock))
    return Group(spent, Text(), evaluation_text(found["evaluation"]), Text("\n".join(lines)))


def evaluation_text(evaluation: dict[str, Any]) -> Any:
    """The measured table, or how many findings there are and where, as a rich renderable."""
    from rich.text import Text

    from dpsynth.console import table

    measured = measures(evaluation)
    if measured:
        columns = ("measured on held-out records", *_columns(evaluation).values())
        return table(columns, measured)
    what, where = counted(evaluation["findings"], "curator-only finding"), evaluation["where"]
    return Text(f"measured: {what} in {where}")


def measures(evaluation: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Rows of the measured table; none where the values may not be shown."""
    names = {
        "accuracy": "accuracy of a probe trained on synthetic alone",
        "frechet": "Frechet distance",
        "precision": "precision",
        "recall": "recall",
    }
    return [
        (text, *(evaluation[key].get(column) for column in _columns(evaluation)))
        for key, text in names.items()
        if isinstance(evaluation.get(key), dict)
    ]


def _columns(evaluation: dict[str, Any]) -> dict[str, str]:
    """Columns of the measured table, by their key in the report; of an augmenting plan one more."""
    names = {
        "synthetic": "synthetic",
        "plain": "without augmentation",
        "ceiling": "ceiling",
        "floor": "floor",
    }
    accuracy = evaluation.get("accuracy")
    if not (isinstance(accuracy, dict) and "plain" in accuracy):
        del names["plain"]
    return names
