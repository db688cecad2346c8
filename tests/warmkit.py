"""Python programs in processes of their own that need not load torch and the like again.

Each is a fork of one server, which holds libraries of others and nothing of dpsynth; it has its own
folder, environment, output and end. Where a test asks what is imported, or interrupts a process,
`subprocess` stays the right way.
"""

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path


class _Server:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("warm_driver.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        atexit.register(self.end)

    def code(self, request: dict[str, object]) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def end(self) -> None:
        self._process.communicate(timeout=30)


@functools.cache
def _server() -> _Server:
    return _Server()


def python(
    program: str,
    *arguments: object,
    folder: Path | None = None,
    environment: dict[str, str] | None = None,
    timeout: int = 600,
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run([sys.executable, "-c", program, *arguments])` with its output as text.

    A program that runs longer than `timeout` seconds ends with the code -14, of SIGALRM.
    """
    with tempfile.TemporaryDirectory() as spoken:
        streams = {name: Path(spoken) / name for name in ("out", "err")}
        request = {
            "program": program,
            "arguments": [str(one) for one in arguments],
            "folder": str(folder or Path.cwd()),
            "environment": dict(os.environ) | {"OMP_NUM_THREADS": "1"} | (environment or {}),
            "timeout": timeout,
            **{name: str(path) for name, path in streams.items()},
        }
        code = _server().code(request)
        out, err = (path.read_text() if path.exists() else "" for path in streams.values())
    return subprocess.CompletedProcess(["python", "-c", program], code, out, err)
