"""The prior's samples, guided ones, the controls and private images: for the documentation."""

from pathlib import Path

from benchmarks.frozen import gap, things
from benchmarks.frozen.plans import MEANS
from benchmarks.frozen.runs import PRIVATE, Runs

TITLES = {
    "released": "guided: released mean",
    "zero": "control: zero mean",
    "random": "control: random direction",
    "public": "control: public mean",
}


def draw(runs: Runs, sigma: float, path: Path) -> Path:
    """A row for each, one image of every class."""
    from dpsynth.artifacts.sheet import contact_sheet

    runs.unguided(PRIVATE)
    rows = [("the frozen prior", *gap.samples_in(runs.work / "drawn" / f"{PRIVATE}-prior"))]
    for mean in MEANS:
        runs.guided(PRIVATE, 0, sigma, mean)
        folder = runs.work / "drawn" / f"{PRIVATE}-0-{mean}-{sigma:g}"
        rows.append((TITLES[mean], *gap.samples_in(folder)))
    private = things.private_set(PRIVATE, runs.size.records, runs.size.side)
    rows.append(("private images", *private))
    shown = [(name, images[_one_each(labels)]) for name, images, labels in rows]
    title = f"Guidance of a frozen prior at epsilon 2, from sigma {sigma:g}; a class a column"
    path.parent.mkdir(parents=True, exist_ok=True)
    return contact_sheet(shown, path, title=title)


def _one_each(labels: things.Labels) -> list[int]:
    """The place of the first image of every class."""
    return [int((labels == label).nonzero()[0][0]) for label in range(len(things.CLASSES))]
