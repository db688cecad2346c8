"""`dpsynth compare`: several plans on the same private records, in one table and one figure."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpsynth.commands import _chain
from dpsynth.commands import _options as opt
from dpsynth.console import counted, note, result
from dpsynth.errors import UsageError

if TYPE_CHECKING:
    from dpsynth.planning.verify import VerifiedPlan
    from dpsynth.private.engine import EngineSettings


def compare(
    plans: Annotated[
        list[Path],
        typer.Argument(
            metavar="PLAN...",
            help="Plan files, carried out as by `dpsynth run`, and run folders.",
            show_default=False,
        ),
    ],
    *,
    epsilon: Annotated[
        list[float] | None,
        typer.Option(
            "--epsilon",
            metavar="E",
            help="Take every plan file at this epsilon in place of its own; may be given several "
            "times.",
        ),
    ] = None,
    repeat: Annotated[
        int,
        typer.Option(
            "--repeat",
            min=1,
            max=99,
            metavar="N",
            help="Fresh runs of each plan file and epsilon, NAME-1 to NAME-N, whose budgets add "
            "up: the records are declared public, or the plan's cap allows it.",
        ),
    ] = 1,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="The comparison's folder. Default: ./runs/comparison-NAMES.",
            show_default=False,
        ),
    ] = None,
    no_run: Annotated[
        bool,
        typer.Option("--no-run", help="Run nothing: pick up what is finished, name the rest."),
    ] = False,
    private: opt.PrivatePath = None,
    threads: opt.Threads = None,
    workers: opt.Workers = None,
    physical_batch: opt.PhysicalBatch = None,
    precision: opt.Precision = "float32",
    exact_sums: opt.ExactSums = False,
    show_curator: opt.ShowCurator = False,
    json: opt.Json = False,
) -> None:
    """Run or pick up several plans on the same data; one table and one figure, curator-only.

    Budgets, private records, image shape, classes, held-out rule and protocol are checked to be
    equal before anything is run. Every run lies in ./runs, is entered in the ledger of its private
    records and replayed. Interrupted, the same command goes on.

    It writes comparison.json, comparison.html and comparison.png: accuracy against Frechet
    distance, one path for each method over epsilon, with spreads over repeated runs. They hold
    values of private records without noise, and choosing a method by them is outside the guarantee.

    Example: dpsynth compare plans/mnist-straightdp.yaml plans/mnist-merf.yaml --epsilon 1
    """
    epsilons = epsilon or []
    if not all(math.isfinite(value) and value > 0 for value in epsilons):
        raise UsageError("--epsilon is a number above 0", hint="--epsilon 1")
    opt.use_threads(threads)
    opt.use_workers(workers)
    from dpsynth.assess.comparison.making import REPORT
    from dpsynth.assess.comparison.making import compare as library_compare

    def engine() -> "EngineSettings":
        from dpsynth.private.engine import EngineSettings  # torch enters here

        return EngineSettings(physical_batch, precision, exact_sums=exact_sums)

    def carry_out(verified: "VerifiedPlan") -> "VerifiedPlan":
        opt.Typed.run = verified.run.root  # hints of its steps name it
        made = _chain.carry_out(verified, engine)
        opt.Typed.run = None
        return made

    report = library_compare(
        plans,
        out,
        epsilons=epsilons,
        repeat=repeat,
        private=private,
        carry_out=None if no_run else carry_out,
    )
    if report["private_source_declared_public"]:
        note("the plans declare their private source public: curator-only values are shown")
    shown = show_curator or report["private_source_declared_public"]
    where = Path(report["page"]).with_name(REPORT)
    found = opt.findings(report, where, shown)
    result(found, json, lambda: _text(found))


def _text(found: dict[str, Any]) -> Any:
    """The table for people; where its values may not be shown, how many and where."""
    if "rows" not in found:
        return f"measured: {counted(found['findings'], 'curator-only finding')} in {found['where']}"
    from rich.console import Group
    from rich.text import Text

    from dpsynth.assess.comparison.rows import FIRST, spread
    from dpsynth.assess.report.measures import name_of
    from dpsynth.console import table

    lines = [
        (
            row["method"],
            f"{row['epsilon']:g}",
            len(row["runs"]),
            *(spread(row["measures"].get(key)) for key in FIRST),
            f"{row['spent']:.4g}",
            spread(row["seconds"]),
        )
        for row in found["rows"]
    ]
    for side, values in found["bounds"].items():
        lines.append((side, "", "", *(spread(values.get(key)) for key in FIRST), "", ""))
    columns = ("method", "epsilon", "runs", *map(name_of, FIRST), "spent", "seconds a run")
    places = [f"note: {text}" for text in found["notes"]]
    places += [f"page:   {found['page']}", f"figure: {found['figure']}"]
    places.append(f"report: {found['where']}")
    return Group(table(columns, lines), *map(Text, places))
