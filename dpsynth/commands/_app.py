"""The typer app: every subcommand in the panel of its room."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from dpsynth import __version__
from dpsynth.commands import _options as opt
from dpsynth.commands.audit import audit
from dpsynth.commands.check import check
from dpsynth.commands.close import close
from dpsynth.commands.compare import compare
from dpsynth.commands.complete_wavelet import complete_wavelet
from dpsynth.commands.evaluate import evaluate
from dpsynth.commands.evolve import evolve
from dpsynth.commands.guide import guide
from dpsynth.commands.plan import plan
from dpsynth.commands.pretrain import pretrain
from dpsynth.commands.reference import reference
from dpsynth.commands.release_central import release_central
from dpsynth.commands.release_embedding import release_embedding
from dpsynth.commands.release_evaluation import release_evaluation
from dpsynth.commands.release_moments import release_moments
from dpsynth.commands.replay import replay
from dpsynth.commands.report import report
from dpsynth.commands.run import run
from dpsynth.commands.sample import sample
from dpsynth.commands.status import status
from dpsynth.commands.train import train
from dpsynth.errors import UsageError


class _Group(TyperGroup):
    """Typer's group of commands; what it refuses is said as every other error is."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As of typer: the options before the subcommand."""
        with _as_usage():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """As of typer: the subcommand with its own options."""
        with _as_usage():
            return super().invoke(ctx)


@contextmanager
def _as_usage() -> Iterator[None]:
    """Typer's refusals as a UsageError: what was given, what was expected, what to type."""
    try:
        yield
    except Exception as error:
        # Click's exceptions have no public home in every version of typer: known by what they do.
        if not hasattr(error, "format_message") or type(error).__name__ == "NoArgsIsHelpError":
            raise
        said = expected(error.__cause__)
        if said and hasattr(error, "message"):
            error.message = said
        here = " ".join(filter(None, ("dpsynth", opt.Typed.command)))
        path = getattr(getattr(error, "ctx", None), "command_path", here)
        raise UsageError(error.format_message().rstrip("."), hint=f"{path} --help") from None


def expected(cause: BaseException | None) -> str | None:
    """Words on a value that typer's validator refused: what was given, and what was expected.

    `cause`: pydantic's error where typer asked it; None where an older typer has words of its own.
    """
    errors = getattr(cause, "errors", None)
    if errors is None:
        return None
    first = errors()[0]
    said = str(first["msg"]).removeprefix("Value error, ").rstrip(".")
    wanted = said.removeprefix("Input should be ").partition(", unable to parse")[0]
    for long, short in (
        ("greater than or equal to", "at least"),
        ("less than or equal to", "at most"),
    ):
        wanted = wanted.replace(long, short)
    return said if wanted == said else f"{first['input']!r} was given, expected {wanted}"


app = typer.Typer(
    name="dpsynth",
    cls=_Group,
    help="Private release of synthetic images: plan a budget, release, generate, measure, replay.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # locals may hold private images
    pretty_exceptions_show_locals=False,
)

# In the order of work; the panels name the rooms that a command may enter.
for _panel, _name, _function in (
    (opt.PLAN, "plan", plan),
    (opt.PLAN, "run", run),
    (opt.PLAN, "status", status),
    (opt.PUBLIC, "pretrain", pretrain),
    (opt.SPENDS, "release-moments", release_moments),
    (opt.SPENDS, "release-embedding", release_embedding),
    (opt.SPENDS, "evolve", evolve),
    (opt.SPENDS, "release-central", release_central),
    (opt.SPENDS, "train", train),
    (opt.SPENDS, "release-evaluation", release_evaluation),
    (opt.POST, "sample", sample),
    (opt.POST, "guide", guide),
    (opt.POST, "complete-wavelet", complete_wavelet),
    (opt.POST, "replay", replay),
    (opt.POST, "close", close),
    (opt.LOOKS, "check", check),
    (opt.LOOKS, "evaluate", evaluate),
    (opt.LOOKS, "reference", reference),
    (opt.LOOKS, "compare", compare),
    (opt.LOOKS, "audit", audit),
    (opt.LOOKS, "report", report),
):
    app.command(_name, rich_help_panel=_panel)(_function)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"dpsynth {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=False)
def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Private release of synthetic images: plan a budget, release, generate, measure, replay."""
    del version  # done with by its callback
    opt.Typed.command = context.invoked_subcommand
    opt.require_shared(context.invoked_subcommand)
