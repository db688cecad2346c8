"""The command line: runs the app, and turns every error into one message and its exit code."""

import os
import shlex
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from dpsynth.commands._app import app
from dpsynth.commands._options import CHARGES, Typed
from dpsynth.console import answer_failure, hint_for, note, show_error
from dpsynth.errors import DpsynthError, MissingError, UsageError

FAULT = 1
INTERRUPTED = 130
STOPPED = 143


class _StoppedError(BaseException):
    """SIGTERM was heard. No Exception: nothing on its way up takes it for a fault."""


def main() -> None:
    """Run the command line; every error ends in one clear message and its exit code."""
    try:
        with _hearing_sigterm():
            app()
    except DpsynthError as error:
        _end(error)
    except ModuleNotFoundError as error:
        _end(_missing_extra(error))
    except OSError as error:
        _end(_refused(error))
    except KeyboardInterrupt:
        _interrupted()
    except _StoppedError:
        _stopped()
    except SystemExit as error:
        if error.code == INTERRUPTED:
            _interrupted()
        raise
    except Exception as error:  # one line for people, the traceback on request, never locals
        if os.environ.get("DPSYNTH_DEBUG") == "1":
            traceback.print_exc()
        fault, hint = f"internal error: {type(error).__name__}", "DPSYNTH_DEBUG=1 shows where"
        note(f"{fault} ({hint})")
        note("please report this: it is a fault of dpsynth")
        _answer(fault, hint, FAULT)
        raise SystemExit(FAULT) from None


def _answer(message: str, hint: str, code: int) -> None:
    """Where `--json` was typed, say on stdout too what went wrong; of several processes once."""
    if "--json" in sys.argv[1:] and os.environ.get("RANK", "0") == "0":
        answer_failure(message, hint, code)


def _end(error: DpsynthError) -> NoReturn:
    if os.environ.get("DPSYNTH_DEBUG") == "1":
        traceback.print_exc()
    show_error(error, Typed.run)
    _answer(error.message, hint_for(error.hint, Typed.run), error.exit_code)
    raise SystemExit(error.exit_code)


def _interrupted() -> NoReturn:
    """A command goes on where it was; of those that charge, what was cut off after it is spent."""
    again = _typed_again()
    note(f"interrupted; resume with: {again}")
    note(
        _unspent()
        or hint_for(
            "what was cut off after its charge is spent: dpsynth status RUN says what is left",
            Typed.run,
        )
    )
    _answer("interrupted", again, INTERRUPTED)
    raise SystemExit(INTERRUPTED)


def _stopped() -> NoReturn:
    """As for an interrupt, in one line: whoever sends SIGTERM reads a log."""
    again = _typed_again()
    what = f"stopped by SIGTERM; {_unspent() or 'charges so far stay spent'}"
    note(f"{what}, and the same command resumes: {again}")
    _answer(what, again, STOPPED)
    raise SystemExit(STOPPED)


def _unspent() -> str:
    """Of a command that charges nothing, that it does not; else nothing."""
    if Typed.command is None or Typed.command in CHARGES:
        return ""
    if Typed.command == "audit":
        return "an audit spends no budget, and keeps the trainings that it finished"
    return f"{Typed.command} spends no budget"


def _typed_again() -> str:
    typed = shlex.join(["dpsynth", *sys.argv[1:]])
    return f"the same torchrun command ({typed})" if os.environ.get("RANK") else typed


@contextmanager
def _hearing_sigterm() -> Iterator[None]:
    """Make SIGTERM end a process by itself alone with a word; a second one ends it at once.

    Of several processes each hears it where they have joined (`distributed.joining`). A parent
    that lets its children ignore it means that.
    """
    several = os.environ.get("WORLD_SIZE", "1") != "1"
    if several or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def stop(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise _StoppedError

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _refused(error: OSError) -> DpsynthError:
    """A full disk, a folder without rights. The path stays unsaid: it may be a private file's."""
    return UsageError(
        f"the file system refused: {error.strerror or type(error).__name__}",
        hint="free some space or give the rights, then type the same command again",
    )


def _missing_extra(error: ModuleNotFoundError) -> DpsynthError:
    name = (error.name or "a module").partition(".")[0]
    if name == "dpsynth":
        return MissingError(
            f"this install of dpsynth lacks {error.name}", hint="pip install --force-reinstall -e ."
        )
    extra = "sd3" if name in {"diffusers", "peft", "transformers"} else "torch"
    return MissingError(
        f"this step needs {name}, which the base install leaves out",
        hint=f"pip install -e '.[{extra}]'",
    )
