"""`dpsynth status`: what is done, what is spent, what to type next."""

from typing import TYPE_CHECKING

from dpsynth.commands import _options as opt
from dpsynth.console import counted, result

if TYPE_CHECKING:
    from dpsynth.planning.steps import Status


def status(run: opt.Run, json: opt.Json = False) -> None:
    """Say what a run has done and spent, and what to type next; opens no data.

    Example: dpsynth status runs/digits
    """
    from dpsynth.artifacts.rooms import RunDir
    from dpsynth.planning.steps import status as library_status

    found = library_status(RunDir.open(run))
    result(found.to_json(), json, lambda: _text(found))


def _text(found: "Status") -> str:
    lines = [f"{'done' if step.done else '-':>4}  {step.name}" for step in found.steps]
    budget = found.lock.budget
    slots = f"{len(found.state.charged)} of {counted(len(found.lock.slots), 'slot')} charged"
    lines.append(
        f"spent: epsilon {found.epsilon_spent:.4f} of {budget['epsilon']:g} at delta "
        f"{budget['delta']:g} ({slots}, {len(found.state.forfeited)} forfeited)"
        + ("; closed: nothing more can be spent" if found.state.closed else "")
    )
    if found.lock.unsafe_seed is not None:
        lines.append("UNSAFE: noise comes from a fixed seed")
    following = found.next_command
    lines.append(f"next: {following}" if following else "all done")
    return "\n".join(lines)
