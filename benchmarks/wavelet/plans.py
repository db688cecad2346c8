"""The plans behind the emoji table, and what a cell of it changes of them.

The shipped plans say everything; a run takes its epsilon and the captions of the table.
"""

import csv
import hashlib
import io
import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PLANS = Path(__file__).resolve().parents[2] / "plans"
DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
EMOJI = DATA / "emoji"
METHODS = {
    "wavelet": "emoji-wavelet",
    "raster": "emoji-raster",
    "ldm": "emoji-ldm",
}
"""DP-Wavelet; raster order with all parameters trained (DP-LlamaGen's setting); a latent diffusion
with attention and conditioning trained (DP-LDM's setting)."""
NAMES = {"wavelet": "DP-Wavelet", "raster": "raster order, all", "ldm": "latent diffusion"}
BUDGETS = ("pretrained", "1", "10", "none")
"""Columns of the table: the public model, epsilon 1 and 10, and neither clip nor noise."""
COUNTS = {"compact": 1_000, "full": 3_780, "tiny": 100}
"""Captions that images are drawn for, by size."""


@dataclass(frozen=True)
class Cell:
    """One run: a method at one of `BUDGETS`, by number."""

    method: str
    budget: str
    number: int = 0

    @property
    def name(self) -> str:
        """Of its folder.

        >>> Cell("wavelet", "10", 2).name
        'wavelet-10-2'
        """
        return f"{self.method}-{self.budget}-{self.number}"

    @property
    def private(self) -> bool:
        """Whether it spends budget; the others are references beside a public room."""
        return self.budget in ("1", "10")


def cells(methods: tuple[str, ...] = tuple(METHODS), *, full: bool = False) -> list[Cell]:
    """The runs of the table: three at epsilon 10 and one elsewhere; `full`: three at 1 too.

    >>> [cell.name for cell in cells(("raster",))]  # doctest: +NORMALIZE_WHITESPACE
    ['raster-pretrained-0', 'raster-10-0', 'raster-1-0', 'raster-none-0', 'raster-10-1',
     'raster-10-2']
    """
    first = [Cell(m, budget) for budget in ("pretrained", "10", "1", "none") for m in methods]
    more = ("10", "1") if full else ("10",)
    later = [Cell(m, budget, n) for n in (1, 2) for budget in more for m in methods]
    return first + later


def plan_of(
    method: str, budget: str, captions: Path, count: int, *, tiny: bool = False
) -> dict[str, Any]:
    """A shipped plan as plain values, which YAML reads as JSON, at this budget.

    `tiny`: hardly any step of any training, to see whether all of it runs.
    """
    from dpsynth.planning.yaml_plan import load_plan

    plan = load_plan(PLANS / f"{METHODS[method]}.yaml")
    facts: dict[str, Any] = plan.model_dump(mode="json", exclude_defaults=True)
    if budget in ("1", "10"):
        facts["budget"]["epsilon"] = float(budget)
    facts["sampling"] |= {"count": count, "captions": str(captions)}
    return hurried(facts) if tiny else facts


def hurried(plan: dict[str, Any]) -> dict[str, Any]:
    """The plan with a few steps of each training."""
    plan["prior"] = plan.get("prior", {}) | {"steps": 12, "batch": 16}
    plan["stages"]["train"] |= {"steps": 2, "chunk": 1, "rate": 0.02}
    if "tokens" in plan:
        plan["tokens"]["tokenizer"] |= {"steps": 30, "batch": 8}
    if "autoencoder" in plan["representation"]:
        plan["representation"]["autoencoder"] |= {"epochs": 1}
    return plan


def planned(path: Path, plan: dict[str, Any]) -> Path:
    """The plan's file, written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(plan, indent=1))
    return path


def captions_file(path: Path, count: int, source: Path | None = None) -> Path:
    """`count` captions of the public images with their labels, drawn by a hash of each; as CSV."""
    rows = {row["text"]: row["label"] for row in listed(source or EMOJI / "twemoji.zip")}
    order = sorted(rows, key=lambda text: hashlib.sha256(text.encode()).digest())
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("text", "label"))
    writer.writerows((text, rows[text]) for text in order[:count])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(out.getvalue(), encoding="utf-8")
    return path


def listed(archive: Path) -> list[dict[str, str]]:
    """The rows of an emoji archive's metadata: file_name, text, label."""
    with zipfile.ZipFile(archive) as kept:
        content = kept.read("metadata.csv").decode("utf-8")
    return list(csv.DictReader(io.StringIO(content, newline="")))
