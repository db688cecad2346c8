"""`comparison.html`: the table and the figure on one self-contained page."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dpsynth.assess.comparison.rows import FIRST, keys_of, spread
from dpsynth.assess.report.measures import name_of
from dpsynth.assess.report.tables import Cell, Table, interval
from dpsynth.released.page.render import number, png_uri, render

TEMPLATES = Path(__file__).parent / "templates"
_BOUNDS = {
    "ceiling": ("ceiling", "real training records in the samples' place"),
    "floor": ("floor", "public images; of accuracy, a constant answer"),
}


def build_page(found: Mapping[str, Any], png: bytes | None) -> str:
    """The page's HTML, the same for the same comparison to the byte. `found`: comparison.json."""
    rows, runs = found["rows"], found["runs"]
    keys = keys_of(runs)
    values = {
        "title": f"{_names(rows)}: comparison ({found['room']})",
        "name": " against ".join(_methods(rows)[:4]) + ("" if len(_methods(rows)) < 5 else " …"),
        "public": found["private_source_declared_public"],
        "unsafe": any(one["unsafe"] for one in runs),
        "key_figures": _figures(found),
        "main": _measured(found, [key for key in keys if key in FIRST], costs=True),
        "others": _measured(found, [key for key in keys if key not in FIRST], costs=False),
        "figure": None if png is None else png_uri(png),
        "runs": _runs(runs),
        "notes": found["notes"],
        "common": _common(found),
    }
    return render("comparison.html", values, folder=TEMPLATES)


def _methods(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["method"] for row in rows))


def _names(rows: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(_methods(rows))


def _measured(found: Mapping[str, Any], keys: Sequence[str], *, costs: bool) -> Table | None:
    """A row for each method and epsilon, then ceiling and floor."""
    if not keys and not costs:
        return None
    head = ("method", "epsilon", "runs", *map(name_of, keys))
    more = ("epsilon spent", "seconds a run") if costs else ()
    rows = [(_heading(row), _cells(row, keys, costs=costs)) for row in found["rows"]]
    for side, (name, small) in _BOUNDS.items():
        values = [Cell(_together(found["bounds"][side].get(key))) for key in keys]
        empty = [Cell("")] * 2
        rows.append(
            (Cell(name, small if costs else ""), (*empty, *values, *(empty if costs else ())))
        )
    beneath = " Small print under a row of one run: its interval." if costs else ""
    caption = (
        "Mean ± standard deviation over the runs of a row, measured on held-out records by one "
        f"protocol.{beneath}"
    )
    return Table(caption, (*head, *more), tuple(rows))


def _heading(row: Mapping[str, Any]) -> Cell:
    return Cell(row["method"], "" if row["kind"] is None else f"method: {row['kind']}")


def _cells(row: Mapping[str, Any], keys: Sequence[str], *, costs: bool) -> tuple[Cell, ...]:
    values = [row["measures"].get(key) for key in keys]
    cells = [
        Cell(_together(value), interval(value.get("interval")) if value and costs else "")
        for value in values
    ]
    made = [Cell(number(row["epsilon"])), Cell(number(len(row["runs"]))), *cells]
    if costs:
        alone = ", ".join(f"{name} {number(value)}" for name, value in row["by_stage"].items())
        made += [Cell(number(row["spent"]), f"alone: {alone}"), Cell(_together(row["seconds"]))]
    return tuple(made)


def _together(value: Mapping[str, Any] | None) -> str:
    """Mean and spread in one piece: no line of a narrow cell ends between them."""
    return spread(value).replace(" ", "\u00a0")


def _runs(runs: Sequence[Mapping[str, Any]]) -> Table:
    """One row a run: what stands behind the means."""
    rows = tuple(
        (
            Cell(one["run"], one["verdict"]),
            (
                Cell(one["method"]),
                Cell(number(one["epsilon"])),
                Cell(number(one["spent"])),
                *(Cell(number(one["measures"].get(k, {}).get("synthetic"))) for k in FIRST),
                Cell(number(one["samples"])),
                Cell(number(one["seconds"]), _public_of(one)),
            ),
        )
        for one in runs
    )
    columns = ("run", "method", "epsilon", "spent", *map(name_of, FIRST), "samples", "seconds")
    caption = (
        "Every run with its replayed spend. Seconds are of this comparison's own work: a dash "
        "where a run, or a part of it, was made before."
    )
    return Table(caption, columns, rows, words=frozenset({0}))


def _public_of(one: Mapping[str, Any]) -> str:
    other = one["public_files_of"]
    return "" if other is None else f"public files of {other}"


def _figures(found: Mapping[str, Any]) -> list[dict[str, str]]:
    """What one looks for first; the best value of each measure, and whose it is."""
    rows = found["rows"]
    epsilons = sorted({row["epsilon"] for row in rows})
    figures = [
        ("methods", number(len(_methods(rows))), f"{number(len(found['runs']))} runs"),
        ("epsilon", ", ".join(map(number, epsilons)), f"delta {number(rows[0]['delta'])}"),
    ]
    for key, best in (("accuracy", max), ("frechet", min)):
        known = [row for row in rows if key in row["measures"]]
        if known:
            row = best(known, key=lambda row: row["measures"][key]["mean"])
            said = f"{row['method']}, epsilon {number(row['epsilon'])}"
            figures.append((f"best {name_of(key)}", spread(row["measures"][key]), said))
    return [{"name": name, "value": value, "more": more} for name, value, more in figures]


def _common(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What all runs have in common, and what their budgets add up to."""
    facts = [(name, number(value)) for name, value in found["common"].items()]
    for one in found["ledgers"]:
        facts.append(
            (
                "ledger of the private records",
                f"{number(one['runs'])} runs, epsilon {number(one['epsilon'])} and delta "
                f"{number(one['delta'])} in all: budgets add up, these runs' and all others'",
            )
        )
    return facts
