"""The table by mechanism that `dpsynth plan` and `dpsynth run` show."""

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any

from dpsynth.accounting.statistics import (
    CellMoments,
    ConfusionMatrix,
    CrossMoments,
    PaperCrossMoments,
    sensitivity,
)
from dpsynth.artifacts.lock import Lock
from dpsynth.console import table
from dpsynth.planning.facts import with_paths
from dpsynth.planning.groups import MEANS, means_facts, means_notes
from dpsynth.planning.method_notes import method_notes
from dpsynth.planning.tokens import Tokens
from dpsynth.planning.units import unit_words

if TYPE_CHECKING:
    from rich.console import Group

CANDIDATES = ("beta", "clip by time bucket", "noise / clip", "epsilon", "utility", "")
_MANY = 4
"""Rounds of the same noise that the table shows as one row; vote rounds are up to 64."""
COLUMNS = ("mechanism", "executions", "noise multiplier", "rate", "epsilon alone", "share")


def rows(lock: Lock) -> Iterator[tuple[Any, ...]]:
    """One row a stage, one for each of its rounds, then the total that the budget must cover."""
    for stage, row in lock.by_stage.items():
        yield (
            stage,
            row["executions"],
            f"{row['noise_multiplier']:.5g}",
            row["rate"],
            f"{row['epsilon_alone']:.4f}",
            f"{row['share']:.3f}",
        )
        for one in _folded(rounds(lock, stage)):
            noise, share = f"{one['noise_multiplier']:.5g}", f"({one['share']:.3f})"
            yield f"  {one['release']}", one["executions"], noise, None, "", share
    yield "composed", "", "", "", f"{lock.epsilon:.4f}", ""
    yield "budget", "", "", "", f"{lock.budget['epsilon']:.4f}", ""


def rounds(lock: Lock, stage: str) -> list[dict[str, Any]]:
    """How a stage's releases split its noise; empty for a stage that is one release, or training.

    `noise_multiplier` is noise over sensitivity, `share` the round's part of the stage's
    1/sigma^2, `executions` its slots, spares among them.
    """
    groups = {} if stage == "train" else lock.releases(stage)
    if len(groups) < 2:
        return []
    noise = {name: group[0].noise_std / sensitivity(group[0].statistic)
             for name, group in groups.items()}  # fmt: skip
    least = min(noise.values())  # first, so that nothing overflows
    total = sum((least / value) ** 2 for value in noise.values())
    return [
        {
            "release": name,
            "executions": len(group),
            "noise_multiplier": noise[name],
            "share": (least / noise[name]) ** 2 / total,
        }
        for name, group in groups.items()
    ]


def _folded(found: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Rounds that follow one another with the same noise as one row, where there are many."""
    runs = [list(run) for _, run in groupby(found, key=lambda one: one["noise_multiplier"])]
    for run in runs:
        if len(run) < _MANY:
            yield from run
            continue
        name = f"{run[0]['release']} to {run[-1]['release']}"
        sums = {key: sum(one[key] for one in run) for key in ("executions", "share")}
        yield {**run[0], "release": name, **sums}


def candidates(lock: Lock) -> Iterator[tuple[Any, ...]]:
    """One row for each shape that the planner looked at (StraightDP, B.5)."""
    said = lock.allocation or {}
    for one in said.get("candidates", ()):
        made = one["noise_std"] is not None
        chosen = one["beta"] == said["beta"]
        yield (
            f"{one['beta']:g}",
            _short(one["clips"]),
            _short(one["noise_multipliers"]) if made else "no noise met the budget",
            f"{one['epsilon']:.4f}" if made else "",
            f"{one['utility']:.6f}" if made else "discarded",
            "chosen" if chosen else "",
        )


def _short(numbers: list[float]) -> str:
    return " ".join(f"{number:.4g}" for number in numbers)


def render(lock: Lock, where: str) -> "Group":
    """The table and what it means, as a rich renderable."""
    from rich.console import Group
    from rich.text import Text

    spent, notes = table(COLUMNS, rows(lock)), Text("\n".join(_footnotes(lock, where)))
    shapes = list(candidates(lock))
    if not shapes:
        return Group(spent, notes)
    return Group(table(CANDIDATES, shapes), Text(), spent, notes)


def as_json(lock: Lock) -> dict[str, Any]:
    """The table as plain JSON values."""
    return {
        "mechanisms": lock.by_stage,
        "rounds": {stage: rounds(lock, stage) for stage in lock.by_stage},
        "epsilon": lock.epsilon,
        "epsilon_optimistic": lock.optimistic,
        "budget": lock.budget,
        "delta_slack": lock.delta_slack,
        "checks": lock.checks,
        "slots": len(lock.slots),
        "spares": sum(slot.spare for slot in lock.slots),
        "split": lock.facts["split"],
        "allocation": lock.allocation,
        MEANS: means_facts(lock),
        "plan_hash": lock.plan_hash,
        "lock_hash": lock.lock_hash,
        "noise_source": lock.noise_source,
    }


def _tokens(facts: dict[str, Any]) -> Iterator[str]:
    """What a plan with tokens learns privately, and what comes from public data alone."""
    if facts.get("tokens") is None:
        return
    tokens, image = Tokens.model_validate(with_paths(facts["tokens"])), facts["private"]["image"]
    counts = tokens.counts(image["height"], image["width"])
    last, rest = tokens.private, sum(counts[tokens.private + 1 :])
    scales = "scale 0 (LL0)" if not last else f"scales 0 (LL0) to {last}"
    if facts["representation"]["kind"] != "tokens":
        yield (
            f"tokens: samples are coarse ones, completed with {rest} tokens of an image by a "
            "public transformer"
        )
    elif not tokens.levels:
        yield f"tokens: all {counts[0]} of an image, in raster order, are learned privately"
    else:
        yield (
            f"tokens: {sum(counts[: last + 1])} of an image ({scales}) are learned privately, the "
            f"{rest} of its detail come from public data alone"
        )


def _footnotes(lock: Lock, where: str) -> Iterator[str]:
    budget = lock.budget
    cells = [slot.statistic.cells for slot in lock.slots if isinstance(slot.statistic, CellMoments)]
    if cells:
        alone = "; one Gaussian a class needs no cells" if cells[0] == 1 else ""
        yield f"cells: at most {cells[0]} a class{alone}"
    for slot in lock.slots:
        if isinstance(slot.statistic, CrossMoments | PaperCrossMoments) and not slot.spare:
            lengths = f"{slot.statistic.features} numbers, codes of {slot.statistic.dim}"
            yield f"captions: moments of caption features of {lengths}, released together"
        if isinstance(slot.statistic, ConfusionMatrix) and not slot.spare:
            matrix, std = slot.statistic, slot.noise_std
            cell, total = f"{std / matrix.cell:.3g}", f"{std / matrix.total:.3g}"
            yield (
                f"evaluation: {matrix.classes} x {matrix.classes} cells, each +- {cell} held-out "
                f"records of noise, their number +- {total}"
            )
    yield from means_notes(lock)
    yield from method_notes(lock)
    yield from _tokens(lock.facts)
    yield (
        f"delta {budget['delta']:g} (of it {lock.delta_slack:.2g} for discrete noise), "
        f"{budget['adjacency']}, unit: {unit_words(budget['unit'])}"
    )
    if any(rounds(lock, stage) for stage in lock.by_stage):
        yield "indented: rounds of one stage; in brackets, the part of its 1/noise^2 that each has"
    if lock.allocation is not None:
        edges, reason = lock.allocation["edges"], lock.allocation["reason"]
        where_from = f" (edges at t = {_short(edges)})" if edges else ""
        yield f"time buckets{where_from}: {reason}"
    if lock.facts["split"] == "epsilon":
        yield (
            "split: epsilon gives each stage its share of epsilon; composed exactly, the total "
            f"is {lock.epsilon:.4f} of {budget['epsilon']:g}"
        )
    if lock.unsafe_seed is not None:
        yield "UNSAFE: noise comes from a fixed seed; nothing of this run may be handed out"
    yield f"lock: {where}"
