"""`dpsynth report`: everything there is to see of a run, on one page for the curator."""

from typing import Any

from dpsynth.commands import _options as opt
from dpsynth.console import note, result


def report(run: opt.Run, json: opt.Json = False) -> None:
    """Write curator/report.html: one page of all that is known of a run; curator-only.

    It shows the plan, the spend by mechanism, what epsilon means in an attacker's odds (the most
    members anyone can find, from the exact trade-off curve), synthetic images by class beside the
    released means, and whatever evaluate and audit have found. It measures nothing and opens no
    private record; what is not there yet is named on the page, with what to type for it.

    The page is one file without scripts: it opens in any browser, offline, on a phone, and prints.
    It shows curator-only values, so it is never handed out; the page that may be is
    released/card.html, made of lock, transcript and released files alone.

    Example: dpsynth report runs/digits
    """
    from dpsynth.artifacts.rooms import RunDir

    folder = RunDir.open(run)

    from dpsynth.assess.report.page import report as library_report

    found = library_report(folder)
    for part in found["sections"]:
        if not part["there"]:
            note(f"{part['title']}: {part['missing']} Type: {part['command']}")
    result(found, json, lambda: _text(found))


def _text(found: dict[str, Any]) -> str:
    there = [part["title"] for part in found["sections"] if part["there"]]
    return f"report: {found['report']}   (curator only)\nsections: {', '.join(there)}"
