"""The terminal: results on stdout, talk and progress on stderr, errors with what to type next."""

import json as json_lib
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from dpsynth.errors import DpsynthError, RankError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID
    from rich.table import Table

Text = str | Callable[[], Any] | None


class _Voice:
    """Whether this process speaks: of several that work on one run, the main one alone does.

    `answered`: its JSON document is on stdout, where scripts expect one and no more.
    """

    muted = False
    answered = False


@contextmanager
def mute(silent: bool = True) -> Iterator[None]:
    """Print nothing inside the block if `silent`; an error that leaves it is said outside."""
    before, _Voice.muted = _Voice.muted, silent or _Voice.muted
    try:
        yield
    finally:
        _Voice.muted = before


def result(obj: Mapping[str, Any], json: bool = False, text: Text = None) -> None:
    """Print a command's result on stdout, and nothing else there.

    `json`: one JSON document. Otherwise `text`: a string, or a function that returns a string
    or a rich renderable; without it, one `key: value` line an entry.
    """
    if _Voice.muted:
        return
    if json:
        _Voice.answered = True
        print(json_lib.dumps(_finite(obj), indent=2, allow_nan=False), flush=True)
        return
    shown = text() if callable(text) else text
    if shown is None:
        shown = "\n".join(_lines(obj))
    if isinstance(shown, str):
        print(shown, flush=True)
    else:
        render(shown)


def render(renderable: Any) -> None:
    """Print a rich renderable on stdout; colours only on a terminal."""
    if _Voice.muted:
        return
    from rich.console import Console

    Console(soft_wrap=False, width=None if sys.stdout.isatty() else 120).print(renderable)


def note(message: str) -> None:
    """Say something on stderr."""
    if _Voice.muted:
        return
    print(message, file=sys.stderr, flush=True)


def show_error(error: DpsynthError, run: Path | None = None) -> None:
    """Say on stderr what went wrong and what to type next, naming `run` where a hint says RUN.

    Silent for what another process of the run says.
    """
    if isinstance(error, RankError) and error.told:
        return
    note(f"error: {error.message}")
    if error.hint:
        note(f"try: {hint_for(error.hint, run)}")


def hint_for(hint: str, run: Path | None = None) -> str:
    """A hint that names `run` where it says RUN.

    >>> hint_for("dpsynth check RUN", Path("my runs/a"))
    "dpsynth check 'my runs/a'"
    """
    name = "RUN" if run is None else shlex.quote(str(run))
    return re.sub(r"(?<![A-Z_])RUN(?![A-Z_])", lambda _: name, hint)


def failure(message: str, hint: str, exit_code: int) -> dict[str, Any]:
    """What `--json` prints of a command that failed."""
    return {"error": {"message": message, "hint": hint, "exit_code": exit_code}}


def answer_failure(message: str, hint: str, exit_code: int) -> None:
    """Print a failure as JSON on stdout, unless the command's JSON document is there already."""
    if _Voice.answered:
        return
    try:
        result(failure(message, hint, exit_code), json=True)
    except BrokenPipeError:
        # Nobody reads any more; Python's own flush at its end must not complain either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def fail(error: DpsynthError) -> NoReturn:
    """Say what went wrong on stderr and end with the error's exit code."""
    show_error(error)
    raise SystemExit(error.exit_code)


def table(
    columns: Sequence[str], rows: Iterable[Sequence[Any]], *, title: str | None = None
) -> "Table":
    """A rich table for `result` or `render`: first column left, the others right."""
    from rich import box
    from rich.table import Table
    from rich.text import Text as RichText

    built = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(columns):
        built.add_column(name, justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        built.add_row(*(RichText(_cell(value)) for value in row))
    return built


class Bar:
    """Handle of a running progress bar: it knows steps alone, never a value of a record."""

    def __init__(self, shown: "Progress | None", task: "TaskID | None", total: int | None) -> None:
        self._shown, self._task = shown, task
        self.total = total

    def advance(self, steps: float = 1) -> None:
        """Move the bar by `steps`."""
        if self._shown is not None and self._task is not None:
            self._shown.advance(self._task, steps)


@contextmanager
def progress(description: str, total: int | None = None, completed: int = 0) -> Iterator[Bar]:
    """A progress bar on stderr; without a terminal, a line at the start and one at the end."""
    if _Voice.muted:
        yield Bar(None, None, total)
        return
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        note(f"{description} ...")
        yield Bar(None, None, total)
        note(f"{description}: done")
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with RichProgress(*columns, console=Console(stderr=True)) as shown:
        task = shown.add_task(description, total=total, completed=completed)
        yield Bar(shown, task, total)


def counted(number: int, what: str) -> str:
    """A number with its noun.

    >>> counted(1, "record"), counted(0, "record"), counted(2, "training unit")
    ('1 record', '0 records', '2 training units')
    """
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _lines(obj: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in obj.items():
        if isinstance(value, Mapping):
            yield from _lines(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}: {_cell(value)}"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.5g}"
    return str(value)


def _finite(value: Any) -> Any:
    """JSON has no NaN or infinity: they become null."""
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    # NumPy scalars, without importing NumPy here.
    return _finite(value.item()) if hasattr(value, "item") else str(value)
