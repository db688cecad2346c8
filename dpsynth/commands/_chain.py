"""The steps of `dpsynth run`, in order, each skipped where it is finished."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from dpsynth.commands import _options as opt
from dpsynth.commands._measured_table import evaluation_text
from dpsynth.console import note

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
        once = name == "release-evaluation"  # done is done, whatever was made anew before it
        if step.done and (once or not fresh) and not _looks_itself(name, before):
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

    from dpsynth.private.central_stage import release_central_images
    from dpsynth.private.dpsgd import train
    from dpsynth.private.embedded import spend_embedding
    from dpsynth.private.moments import release_moments
    from dpsynth.private.voting import evolve
    from dpsynth.released.distill import distill
    from dpsynth.released.generating import fit
    from dpsynth.released.warm import warm_start

    yield "release-moments", release_moments
    yield "release-embedding", spend_embedding
    yield "fit", fit
    yield "evolve", evolve
    yield "distil", distill
    yield "release-central", release_central_images
    yield "warm-up", warm_start
    yield "train", lambda verified: train(verified, engine=engine())
    yield "close", _close

    from dpsynth.assess.evaluate import evaluate
    from dpsynth.released.completion import complete_wavelet
    from dpsynth.released.sampling import sample

    yield "sample", sample
    yield "complete-wavelet", complete_wavelet

    from dpsynth.private.confusion import release_evaluation

    yield "release-evaluation", release_evaluation
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
        **_released_evaluation(verified),
        "contact_sheet": str(run.released / "contact-sheet.png"),
        "beside_real": str(evaluation["sheet"]),
        "released": str(run.released),
        "replay": replay(run.released).to_json(),
    }


def _released_evaluation(verified: "VerifiedPlan") -> dict[str, Any]:
    """The scores of a charged evaluation; nothing for a plan without, or where it was forfeited."""
    from dpsynth.released.scores import NAME, read_scores

    released = verified.run.released
    return {"released_evaluation": read_scores(released)} if (released / NAME).is_file() else {}


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
    charged = found.get("released_evaluation")
    if charged is not None:
        from dpsynth.released.card import in_words

        lines.insert(0, f"charged accuracy: {in_words(charged['accuracy'])}   (released)")
    spent = budget_table.render(verified.lock, str(verified.run.lock))
    return Group(spent, Text(), evaluation_text(found["evaluation"]), Text("\n".join(lines)))
