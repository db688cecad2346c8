"""The figure: accuracy against Frechet distance, one path for each method over epsilon."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
# Okabe and Ito's colours, which colour-blind readers tell apart; markers tell them apart in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C7A00")
MARKERS = "osD^vP*X"
_WIDE = 20  # distances this many times apart are drawn on a logarithmic scale


def draw(
    rows: Sequence[Row], bounds: Mapping[str, Mapping[str, Any]], title: str, stamp: str
) -> bytes | None:
    """The figure as PNG bytes; None where no row has both measures.

    Better is up and to the left. Bars are one standard deviation over the runs of a row; a row of
    one run has none. `stamp` says who may see it, in the PNG's text fields too.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    paths = paths_of(rows)
    if not paths:
        return None
    figure = Figure(figsize=(8.0, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for place, (method, points) in enumerate(paths.items()):
        _path(axes, method, points, place)
    _bounds(axes, bounds)
    if _is_wide([p["frechet"]["mean"] for points in paths.values() for p in points]):
        axes.set_xscale("log")
    axes.set(xlabel="Frechet distance (lower is better)", ylabel="accuracy (higher is better)")
    axes.set_title(f"{title}\n{stamp}", fontsize=9)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, title="beside each point: epsilon", title_fontsize=7)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=140, metadata={"Software": None, "dpsynth": stamp})
    return out.getvalue()


def paths_of(rows: Sequence[Row]) -> dict[str, list[dict[str, Any]]]:
    """Points by method, epsilon rising: epsilon, accuracy and Frechet distance of each."""
    paths: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        values = {key: row["measures"].get(key) for key in ("accuracy", "frechet")}
        if all(value is not None for value in values.values()):
            point = {"epsilon": row["epsilon"], **values}
            paths.setdefault(row["method"], []).append(point)
    return paths


def _path(axes: Any, method: str, points: Sequence[Mapping[str, Any]], place: int) -> None:
    xs, ys = ([p[key]["mean"] for p in points] for key in ("frechet", "accuracy"))
    bars = [[p[key]["sd"] or 0.0 for p in points] for key in ("frechet", "accuracy")]
    colour, marker = COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]
    line = "-" if place < len(COLOURS) else "--"
    axes.errorbar(
        xs, ys, xerr=bars[0], yerr=bars[1], label=_plain(method), color=colour, marker=marker,
        linestyle=line, linewidth=1.4, markersize=5, capsize=2.5, elinewidth=0.9,
    )  # fmt: skip
    for x, y, point in zip(xs, ys, points, strict=True):
        axes.annotate(
            f"{point['epsilon']:g}", (x, y), textcoords="offset points", xytext=(5, 5),
            fontsize=7, color=colour,
        )  # fmt: skip


def _bounds(axes: Any, bounds: Mapping[str, Mapping[str, Any]]) -> None:
    """Accuracy of ceiling and floor as lines; their distances, off the axes, in words."""
    for side, style in (("ceiling", ":"), ("floor", "--")):
        accuracy, distance = (bounds[side].get(key) for key in ("accuracy", "frechet"))
        if accuracy is not None:
            far = "" if distance is None else f", distance {distance['mean']:.3g}"
            axes.axhline(
                accuracy["mean"], color="0.45", linewidth=0.9, linestyle=style, label=side + far
            )


def _is_wide(distances: Sequence[float]) -> bool:
    return min(distances) > 0 and max(distances) / min(distances) > _WIDE


def _plain(text: str) -> str:
    """A name without matplotlib's mathematics; one that starts with _ would have no entry."""
    return text.replace("$", r"\$").lstrip("_") or "?"
