"""`dpsynth replay`: recompute what was spent, from the transcript alone."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpsynth.commands import _options as opt
from dpsynth.console import counted, note, result, table
from dpsynth.errors import ReplayError, UsageError

if TYPE_CHECKING:
    from dpsynth.planning.replay import ReplayReport

Targets = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="[TARGET]...",
        help="Run folders, hand-out folders or transcripts. "
        "Default: the run of the plan.yaml in the working directory.",
        show_default=False,
    ),
]
Head = Annotated[
    str | None,
    typer.Option(metavar="HASH", help="Hash of the last line, as published elsewhere."),
]
Partial = Annotated[
    bool, typer.Option("--partial", help="Accept a transcript that is not closed yet.")
]
BudgetText = Annotated[
    str | None,
    typer.Option(
        "--budget",
        metavar="EPS[,DELTA]",
        help="Fail if all targets together exceed this: epsilons and deltas add up.",
    ),
]


def replay(
    targets: Targets = None,
    head: Head = None,
    partial: Partial = False,
    budget: BudgetText = None,
    json: opt.Json = False,
) -> None:
    """Check transcripts and recompute their epsilon; needs no data. Exit 4 if one does not hold.

    Example: dpsynth replay runs/digits --head 5f3c...
    """
    from dpsynth.planning.replay import replay as check

    limit = parse_budget(budget)
    places = targets or [opt.default_run()]
    report = check(*places, head=head, partial=partial, budget=limit)
    report = replace(report, notes=(*report.notes, *scores_notes(places)))
    result(report.to_json(), json, lambda: as_text(report))
    if not report.ok:
        raise ReplayError(report.verdict, hint="never hand this out; run without --unsafe-seed")


def scores_notes(places: list[Path]) -> list[str]:
    """Recompute the scores of hand-out folders; what to say where that could not be done.

    Raises ReplayError where a file of scores is not what its matrix says.
    """
    from dpsynth.artifacts.manifest import NAME
    from dpsynth.released.scores import check_scores

    found = [check_scores(folder) for folder in places if (folder / NAME).is_file()]
    return [text for text in found if text]


def parse_budget(text: str | None) -> tuple[float, float | None] | None:
    """`EPS` or `EPS,DELTA` as numbers. Raises UsageError for anything else."""
    if text is None:
        return None
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    good = len(numbers) in (1, 2) and 0 < numbers[0] < float("inf")
    if not good or (len(numbers) == 2 and not 0 < numbers[1] < 1):
        raise UsageError(f"--budget {text!r} is not EPS or EPS,DELTA", hint="--budget 3,1e-5")
    return numbers[0], numbers[1] if len(numbers) == 2 else None


def as_text(report: "ReplayReport") -> Any:
    """The report for people: a table by mechanism for each run, totals, the verdict last."""
    from rich.console import Group

    from dpsynth.planning.replay import CANNOT_PROVE

    parts: list[Any] = []
    for run in report.runs:
        rows: list[list[Any]] = [
            [row.mechanism, row.executions, row.noise_multiplier, row.rate, row.epsilon]
            for row in run.rows
        ]
        rows.append(["all charges composed", run.charges, None, None, run.epsilon])
        columns = ["mechanism", "executions", "noise multiplier", "rate", "epsilon alone"]
        parts.append(table(columns, rows, title=run.target))
        parts.append(
            f"epsilon {run.epsilon:.6g} of {run.budget['epsilon']:g} at delta {run.delta:g}; "
            f"{counted(run.charges, 'charge')}, {run.settled} settled, {run.forfeited} forfeited\n"
            f"head {run.head} ({_head_said(run.head_checked)})"
        )
        parts += [f"note: {text}" for text in run.notes]
    parts += [f"note: {text}" for text in report.notes]
    if report.joint is not None:
        parts.append(
            f"sum: epsilon {report.epsilon:.6g} at delta {report.delta:g} (runs chosen one after "
            f"another)\njoint: epsilon {report.joint:.6g} at the same delta (only if no plan was "
            "chosen after another's release)"
        )
    note(CANNOT_PROVE)
    return Group(*parts, f"verdict: {report.verdict}")


def _head_said(checked: str | None) -> str:
    return "not checked" if checked is None else f"matches {checked}"
