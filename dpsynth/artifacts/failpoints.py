"""Named points at which a test may kill the process, to prove that no crash loses a charge.

`DPSYNTH_KILL_AT=charge:written` kills at the first time that point is reached,
`DPSYNTH_KILL_AT=charge:written@3` at the third. Unset, every point does nothing.
"""

import os
import signal
from collections import Counter

POINTS = (
    "charge:before",
    "charge:written",
    "mechanism:done",
    "artifact:written",
    "artifact:renamed",
    "settle:before",
    "settle:written",
    "checkpoint:before",
    "checkpoint:written",
    "close:before",
    "close:written",
    "lock:before",
    "lock:renamed",
)

_reached: Counter[str] = Counter()


def reach(name: str) -> None:
    """Die here by SIGKILL if `DPSYNTH_KILL_AT` names this point (and this many visits)."""
    wanted = os.environ.get("DPSYNTH_KILL_AT")
    if not wanted:
        return
    point, _, visit = wanted.partition("@")
    if point != name:
        return
    _reached[name] += 1
    if _reached[name] >= int(visit or "1"):
        os.kill(os.getpid(), signal.SIGKILL)
