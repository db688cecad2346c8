"""The command line: runs the app, and turns every error into one message and its exit code."""

import os
import shlex
import sys
import traceback
from typing import NoReturn

from dpsynth.commands._app import app
from dpsynth.commands._options import Typed
from dpsynth.console import note, show_error
from dpsynth.errors import DpsynthError, MissingError, UsageError

INTERRUPTED = 130


def main() -> None:
    """Run the command line; every error ends in one clear message and its exit code."""
    try:
        app()
    except DpsynthError as error:
        _end(error)
    except ModuleNotFoundError as error:
        _end(_missing_extra(error))
    except OSError as error:
        _end(_refused(error))
    except KeyboardInterrupt:
        _interrupted()
    except SystemExit as error:
        if error.code == INTERRUPTED:
            _interrupted()
        raise
    except Exception as error:  # one line for people, the traceback on request, never locals
        if os.environ.get("DPSYNTH_DEBUG") == "1":
            traceback.print_exc()
        note(f"internal error: {type(error).__name__} (DPSYNTH_DEBUG=1 shows where)")
        note("please report this: it is a fault of dpsynth")
        raise SystemExit(1) from None


def _end(error: DpsynthError) -> NoReturn:
    if os.environ.get("DPSYNTH_DEBUG") == "1":
        traceback.print_exc()
    show_error(error, Typed.run)
    raise SystemExit(error.exit_code)


def _interrupted() -> NoReturn:
    """A command goes on where it was; only what was charged and not finished is spent."""
    typed = shlex.join(["dpsynth", *sys.argv[1:]])
    again = f"the same torchrun command ({typed})" if os.environ.get("RANK") else typed
    note(f"interrupted; resume with: {again}")
    note("what was cut off after its charge is spent: dpsynth status RUN says what is left")
    raise SystemExit(INTERRUPTED)


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
