"""Arguments and options that several commands share: paths and machine settings, nothing else.

Everything that matters for privacy or for the result is in the plan.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dpsynth.console import note
from dpsynth.distributed.environment import place_in, threads_for
from dpsynth.errors import BudgetError, RankError, UsageError

if TYPE_CHECKING:
    from dpsynth.planning.verify import VerifiedPlan

PLAN = "Plan"
PUBLIC = "Public data"
SPENDS = "Spends budget"
POST = "Post-processing"
LOOKS = "Looks (curator only)"

# What `check` and `evaluate` may always say: how many findings, and where to read them.
ALWAYS_SHOWN = ("findings", "where")


class Typed:
    """This command line: its run folder, which hints name in place of RUN, and its command."""

    run: Path | None = None
    command: str | None = None


def default_run() -> Path:
    """Run folder of the plan.yaml in the working directory."""
    plan = Path("plan.yaml")
    if not plan.is_file():
        raise UsageError(
            "no run folder was given, and there is no plan.yaml in the working directory",
            hint="dpsynth plan --init   (or name the run folder, such as runs/digits)",
        )
    Typed.run = run_folder_of(plan)
    return Typed.run


def run_folder_of(plan: Path) -> Path:
    """Where a plan runs unless `--run` says otherwise: ./runs/NAME."""
    from dpsynth.planning.yaml_plan import load_plan

    return Path("runs") / load_plan(plan).name


def parse_run(text: str | Path) -> Path:
    """A run folder as typed; a plan file stands for its run folder."""
    path = Path(text)
    is_plan = path.suffix in {".yaml", ".yml"} and path.is_file()
    Typed.run = run_folder_of(path) if is_plan else path
    return Typed.run


PlanFile = Annotated[Path, typer.Argument(help="The plan.", metavar="PLAN", show_default=True)]
Run = Annotated[
    Path,
    typer.Argument(
        help="The run folder. Default: that of the plan.yaml in the working directory.",
        metavar="RUN",
        default_factory=default_run,
        show_default=False,
        parser=parse_run,
    ),
]
RunOption = Annotated[
    Path | None,
    typer.Option("--run", help="Run folder. Default: ./runs/NAME.", metavar="DIR"),
]
PrivatePath = Annotated[
    Path | None,
    typer.Option(
        "--private",
        metavar="PATH",
        help="Where the private records lie now, in place of the plan's path: a folder, zip or "
        "NPZ; for an IDX source a folder with files of the same names, or IMAGES,LABELS.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
ShowCurator = Annotated[
    bool,
    typer.Option(
        "--show-curator",
        help="Print curator-only values too: they come from private data without noise.",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option("--threads", min=1, metavar="N", help="CPU threads. Default: all cores."),
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        min=1,
        metavar="N",
        help="Threads that decode pictures of folders and zips. Default: one for each core.",
    ),
]
# File names of samples have seven digits; a slip of the finger must not fill a disk.
MOST_SAMPLES = 10_000_000
Count = Annotated[
    int | None,
    typer.Option(
        "-n", "--count", min=1, max=MOST_SAMPLES, metavar="N", help="Images. Default: the plan's."
    ),
]
PhysicalBatch = Annotated[
    int | None,
    typer.Option(
        "--physical-batch",
        min=1,
        metavar="N",
        help="Examples worked through at once. Default: what fits in memory.",
    ),
]
Precision = Annotated[
    Literal["float32", "bfloat16"],
    typer.Option("--precision", help="Of the model's passes; norms and sums stay in float32."),
]
_FROZEN = "Machine (frozen priors)"
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="NAME",
        envvar="DPSYNTH_DEVICE",
        rich_help_panel=_FROZEN,
        help="Where a frozen prior runs: cpu (default), cuda, cuda:1, mps.",
    ),
]
Dtype = Annotated[
    Literal["float32", "bfloat16", "float16"] | None,
    typer.Option(
        "--dtype",
        metavar="NAME",
        envvar="DPSYNTH_DTYPE",
        rich_help_panel=_FROZEN,
        help="Of its frozen weights: float32 (default), bfloat16, float16. Images are coded in "
        "float32 always.",
    ),
]
Offload = Annotated[
    bool,
    typer.Option(
        "--offload",
        envvar="DPSYNTH_OFFLOAD",
        rich_help_panel=_FROZEN,
        help="Keep one part of it on the device at a time: less memory, more time.",
    ),
]
Batch = Annotated[
    int | None,
    typer.Option(
        "--batch",
        min=1,
        metavar="N",
        envvar="DPSYNTH_BATCH",
        rich_help_panel=_FROZEN,
        help="Images that it works on at once. Default: 8.",
    ),
]
ExactSums = Annotated[
    bool,
    typer.Option(
        "--exact-sums",
        help="Add clipped gradients in float64: slow, and proves the clip without a model of "
        "rounding (docs/engine.md).",
    ),
]
# Read by `readers.parallel`, which a command may not import.
WORKERS = "DPSYNTH_WORKERS"
# What `torchrun ... -m dpsynth` may carry out in several processes.
SHARED = (
    "pretrain", "release-moments", "release-embedding", "evolve", "release-central", "train",
    "sample", "guide",
)  # fmt: skip
# What charges the budget; cut off, every other command leaves nothing spent behind.
CHARGES = (
    "run", "release-moments", "release-embedding", "evolve", "release-central", "train",
    "release-evaluation", "compare",
)  # fmt: skip


def use_threads(threads: int | None) -> None:
    """Limit the numeric libraries' threads; call it before they are imported.

    Of several processes on a machine each has its share of the cores, unless something says so.
    """
    # Threads that wait must not spin: beside other work, spinning costs more than it saves.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    threads = threads_for(os.environ, os.cpu_count() or 1) if threads is None else threads
    if threads is not None:
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            os.environ[name] = str(threads)


def use_workers(workers: int | None) -> None:
    """Let so many threads decode pictures: a machine setting, which changes no record.

    Of several processes on a machine each has its share of the cores, unless it is said otherwise.
    """
    if workers is None and not os.environ.get(WORKERS):
        place = place_in(os.environ)
        if place is not None and place.local_world > 1:
            workers = max(1, (os.cpu_count() or 1) // place.local_world)
    if workers is not None:
        os.environ[WORKERS] = str(workers)


def use_machine(device: str | None, dtype: str | None, offload: bool, batch: int | None) -> None:
    """Settings of the machine for a frozen prior; read by `models.frozen.machine`."""
    said = {"DEVICE": device, "DTYPE": dtype, "OFFLOAD": "1" if offload else None, "BATCH": batch}
    for name, value in said.items():
        if value is not None:
            os.environ[f"DPSYNTH_{name}"] = str(value)


def require_shared(command: str | None) -> None:
    """Refuse several processes for a command that is one process's work.

    Raises UsageError in the first of them; the others end with its exit code and say nothing.
    """
    if command is None or command in SHARED or not os.environ.get("RANK"):
        return
    place = place_in(os.environ)
    if place is None or place.world == 1:
        return
    refusal = UsageError(
        f"{command} works in one process, and {place.world} were started",
        hint=f"dpsynth {command} ...   (torchrun is for {', '.join(SHARED)})",
    )
    if place.is_main:
        raise refusal
    silent = RankError(refusal.message, told=True)
    silent.exit_code = refusal.exit_code
    raise silent


def may_show(verified: "VerifiedPlan", show_curator: bool) -> bool:
    """Whether curator-only values may go to the terminal; says so on stderr when they do."""
    if verified.plan.private.public:
        note("the plan declares its private source public: curator-only values are shown")
        return True
    return show_curator


def visible(results: Mapping[str, Any], show: bool) -> dict[str, Any]:
    """Results of a step without its `curator` entry, unless it may be shown."""
    return {key: value for key, value in results.items() if key != "curator" or show}


def findings(results: Mapping[str, Any], where: Path, show: bool) -> dict[str, Any]:
    """Results of a look at private data: everything if `show`, else the count and the path."""
    full = {**results, "where": str(where)}
    return full if show else {key: full[key] for key in ALWAYS_SHOWN if key in full}


def say_next(verified: "VerifiedPlan") -> None:
    """Tell on stderr what to type next; where the run may spend no more, why."""
    from dpsynth.planning.steps import status

    try:
        following = status(verified.run).next_command
    except BudgetError as error:  # what was asked for is done: it fails by this no more
        note(f"{error.message}: {error.hint}")
        return
    note(f"next: {following}" if following else "all steps of the plan are done")
