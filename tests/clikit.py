"""The command line as a user types it: one command a process, or several in one process."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import warmkit

# Of a plan: the private records of scikit-learn's digits.
DIGITS = """\
private:
  source: {kind: digits}
  public: true
  capacity: 1800
  image: {height: 8, width: 8}
  classes: ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]
  held_out: {by: hash, fraction: 0.2}"""
# Runs each command line of a JSON list; torch is loaded once for all of them.
_DRIVER = """
import contextlib, io, json, sys
from pathlib import Path
import dpsynth.assess.domain as domain
import dpsynth.models.lenet as lenet
from dpsynth.cli import main
lenet.LEAST_STEPS = domain.STEPS = 2  # what probes learn is not asked here
watched, report, lines = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])

def files():
    return {str(p): p.stat().st_mtime_ns for p in sorted(watched.rglob("*")) if p.is_file()}

found = []
for line in lines:
    sys.argv = ["dpsynth", *line]
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    found.append([code, out.getvalue(), err.getvalue(), files()])
Path(report).write_text(json.dumps(found))
"""


@dataclass(frozen=True)
class Typed:
    """How one command ended, and the files of `runs/` after it, with their times of change."""

    code: int
    out: str
    err: str
    files: dict[str, int]


def typed(folder: Path, *lines: str, columns: int = 100, fresh: bool = False) -> list[Typed]:
    """The commands, one after another in one process in `folder`; see `python` for `fresh`."""
    report = folder / "report.json"
    arguments = (folder / "runs", report, json.dumps([line.split() for line in lines]))
    done = python(_DRIVER, *arguments, folder=folder, fresh=fresh, COLUMNS=str(columns))
    assert report.exists(), done.stderr
    return [Typed(*one) for one in json.loads(report.read_text())]


def dpsynth(
    folder: Path, *arguments: str, code: str = "", fresh: bool = False, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the command line in `folder`; `code` runs first, in the same process."""
    program = f"import sys; sys.argv[0] = 'dpsynth'\n{code}\nfrom dpsynth.cli import main\nmain()"
    return python(program, *arguments, folder=folder, fresh=fresh, **environment)


def python(
    program: str, *arguments: object, folder: Path, fresh: bool = False, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A program in a process of its own; `fresh`: in an interpreter that has loaded nothing."""
    environment = {"COLUMNS": "100", "OMP_NUM_THREADS": "1"} | environment
    if not fresh:
        return warmkit.python(program, *arguments, folder=folder, environment=environment)
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
