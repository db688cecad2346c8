"""The command line in a process of its own, as a user types it."""

import os
import subprocess
import sys
from pathlib import Path


def dpsynth(
    folder: Path, *arguments: str, code: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the command line in `folder`; `code` runs first, in the same process."""
    program = f"import sys; sys.argv[0] = 'dpsynth'\n{code}\nfrom dpsynth.cli import main\nmain()"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=folder,
        env=os.environ | {"COLUMNS": "100", "OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
