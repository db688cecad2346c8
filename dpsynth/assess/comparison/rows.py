"""Rows of the table: one for each method and epsilon, mean and spread over its runs."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Result = Mapping[str, Any]
FIRST = ("accuracy", "frechet")
"""The measures of the figure, and the first columns of the table."""


def rows_of(results: Sequence[Result]) -> list[dict[str, Any]]:
    """One row for each method and epsilon: methods as they came, epsilons rising."""
    groups: dict[str, dict[float, list[Result]]] = {}
    for one in results:
        groups.setdefault(one["method"], {}).setdefault(one["epsilon"], []).append(one)
    return [_row(own[epsilon]) for own in groups.values() for epsilon in sorted(own)]


def _row(runs: Sequence[Result]) -> dict[str, Any]:
    first = runs[0]
    seconds = [one["seconds"] for one in runs if one["seconds"] is not None]
    return {
        "method": first["method"],
        "kind": first["kind"],
        "epsilon": first["epsilon"],
        "delta": first["delta"],
        "runs": [one["run"] for one in runs],
        "spent": max(one["spent"] for one in runs),
        "by_stage": first["by_stage"],
        "samples": [one["samples"] for one in runs],
        "seconds": over(seconds) if seconds else None,
        "measures": {key: _measure(runs, key) for key in keys_of(runs)},
    }


def _measure(runs: Sequence[Result], key: str) -> dict[str, Any]:
    found = [one["measures"][key] for one in runs if key in one["measures"]]
    made = over([value["synthetic"] for value in found])
    if len(found) == 1 and "interval" in found[0]:
        made["interval"] = found[0]["interval"]
    return made


def bounds_of(results: Sequence[Result]) -> dict[str, dict[str, Any]]:
    """Ceiling and floor of each measure over all runs: one protocol measured them with each run."""
    return {
        side: {
            key: over(values)
            for key in keys_of(results)
            if (values := [v for one in results if (v := _side(one, key, side)) is not None])
        }
        for side in ("ceiling", "floor")
    }


def _side(one: Result, key: str, side: str) -> float | None:
    value: float | None = one["measures"].get(key, {}).get(side)
    return value


def keys_of(results: Iterable[Result]) -> list[str]:
    """Every measure that some run has: those of the figure first, then as they come."""
    found = dict.fromkeys(key for one in results for key in one["measures"])
    return [*(key for key in FIRST if key in found), *(key for key in found if key not in FIRST)]


def over(values: Sequence[float]) -> dict[str, Any]:
    """Mean of some values, and their standard deviation where there are several.

    >>> over([1.0, 3.0])
    {'mean': 2.0, 'sd': 1.4142135623730951, 'values': [1.0, 3.0]}
    >>> over([2])["sd"] is None
    True
    """
    return {
        "mean": float(statistics.fmean(values)),
        "sd": statistics.stdev(values) if len(values) > 1 else None,
        "values": [float(value) for value in values],
    }


def spread(value: Mapping[str, Any] | None) -> str:
    """Mean and spread as people read them; a dash for what was not measured.

    >>> spread({"mean": 0.61234, "sd": 0.0141}), spread({"mean": 25.04, "sd": None}), spread(None)
    ('0.612 ± 0.014', '25.04', '–')
    >>> spread({"mean": 1234.5, "sd": 56.7}), spread({"mean": 0.5, "sd": 0.0})
    ('1234 ± 57', '0.5')
    """
    if value is None:
        return "–"
    mean, sd = value["mean"], value["sd"]
    if not sd:
        return f"{mean:.4g}"
    digits = max(0, 1 - math.floor(math.log10(sd)))  # two figures of the spread, as of the mean
    return f"{mean:.{digits}f} ± {sd:.{digits}f}"


def notes_of(results: Sequence[Result]) -> list[str]:
    """What a reader must know before comparing the rows."""
    notes = []
    counts = sorted({one["samples"] for one in results if one["samples"] is not None})
    if len(counts) > 1:
        notes.append(
            f"the runs have different numbers of samples ({', '.join(map(str, counts))}): Frechet "
            "distances of fewer samples are larger, and probes learn less from them"
        )
    notes += _differing(results)
    if unsafe := [one["run"] for one in results if one["unsafe"]]:
        notes.append(f"UNSAFE: the noise of {', '.join(unsafe)} came from a fixed seed")
    if single := [row for row in rows_of(results) if len(row["runs"]) == 1]:
        notes.append(
            f"{len(single)} of {len(rows_of(results))} rows are of one run: they have no spread; "
            "their interval is of that run's samples, not of its noise"
        )
    return notes


def _differing(results: Sequence[Result]) -> list[str]:
    """Protocols that are not one, and floors of other public images."""
    notes = []
    keys = dict.fromkeys(key for one in results for key in one["protocol"] if key != "probe_steps")
    apart = [k for k in keys if len({str(one["protocol"].get(k)) for one in results}) > 1]
    if apart:
        notes.append(
            f"the evaluations differ in their protocol ({', '.join(apart)}): dpsynth evaluate RUN "
            "measures a run again"
        )
    floors = bounds_of(results)["floor"].get("frechet")
    if floors is not None and len({f"{value:.6g}" for value in floors["values"]}) > 1:
        notes.append("the plans' public images differ, and so do their floors: a mean is shown")
    return notes
