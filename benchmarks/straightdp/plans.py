"""The plans behind the rows: one base, and what each row changes of it.

Rows of one space share every public stage that their plans have in common.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.straightdp.sizes import CONSTRAINED, SIZES, Size, text_of

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
DIGITS = [str(digit) for digit in range(10)]
FEATURES = ("one-hot", "slots", "sentence")
CLASS_TEMPLATE = {"kind": "template", "template": "the digit {class}"}
TEMPLATE: dict[str, Any] = {
    "kind": "template",
    "template": "a {stroke} {class} with a dot {quadrant}",
    "slots": {
        "stroke": ["thin", "thick"],
        "quadrant": ["upper-left", "upper-right", "lower-left", "lower-right"],
    },
}
WORDS = {"": 1, "captioned": 3, "composed": 8}
"""Words of a caption, by the archive that it comes from."""
CAPACITY = 60_000
DP_SGD, RELEASE = 0.65, 0.2
"""Weights of the stages (Table 9)."""


@dataclass(frozen=True)
class Row:
    """One configuration of a table, at any epsilon.

    Args:
        name: as in the table; the name of the runs.
        space: latent or pixel.
        release: "paper", "class", "cells", a feature kind of a caption release, or none.
        train: DP-SGD over uniform or planned buckets, or none.
        constraints: of the backbone, by key.
        port: how the release enters: "distil", "guide", "both", or the release itself is sampled.
        rate: learning rate of DP-SGD in place of the size's own.
        changes: of the moments stage; None removes a key.
        data: "" for MNIST, "captioned" for MNIST with captions, "composed" for composed digits,
            "letters" for the public stand-in of `--tune`.
        share: of the moments stage's weight, in place of the paper's.
        runs: at epsilon 1, in place of the table's.
        horizon: the time up to which the release is taught, in place of the public knee.
        guidance: weight of classifier-free guidance in sampling.
    """

    name: str
    space: str
    release: str | None = "paper"
    train: str | None = "planned"
    constraints: tuple[str, ...] = ()
    port: str = "distil"
    rate: float | None = None
    changes: tuple[tuple[str, Any], ...] = ()
    data: str = ""
    share: float | None = None
    runs: int | None = None
    horizon: float | None = None
    guidance: float = 1.5

    @property
    def shared(self) -> bool:
        """Whether the release is one with a shared covariance, as the paper's is."""
        return self.release == "paper" or self.release in FEATURES

    @property
    def base(self) -> str:
        """Rows of one base have public images and their codes in common."""
        return f"{self.space}-{self.data}" if self.data else self.space


def plan_of(row: Row, epsilon: float, work: Path, *, size: str = "compact") -> dict[str, Any]:
    """The whole plan of a row as plain values, which YAML reads as JSON."""
    own = SIZES[size][row.space]
    steps, batch, rate = own.prior
    plan: dict[str, Any] = {
        "version": 1,
        "name": run_name(row, epsilon),
        "budget": {"epsilon": epsilon, "delta": 1e-5},
        "private": _private(row, work),
        "public": _public(row, work, own.letters),
        "representation": _representation(row, own),
        "stages": _stages(row, own),
        "velocity": _backbone(row, own),
        "prior": {"steps": steps, "batch": batch, "learning_rate": rate},
        "sampling": {"method": "flow", "count": own.images, "steps": 25, "guidance": row.guidance},
    }
    if row.shared:
        plan["split"] = "epsilon"  # as the paper: shares of epsilon, 0.235 and 0.765
    if row.release and row.train and row.port in ("distil", "both"):
        plan["distillation"] = _distillation(row, own)
    if row.port in ("guide", "both"):
        plan["sampling"]["method"] = "guide"
    if row.port == "sample":
        plan["sampling"]["method"] = "release"
    return plan


def run_name(row: Row, epsilon: float) -> str:
    """A plan's name: letters, digits and hyphens.

    >>> run_name(Row("pixel: + low B0", "pixel"), 0.3)
    'pixel-low-b0-eps-0.3'
    """
    plain = "".join(letter if letter.isalnum() else " " for letter in row.name.lower())
    return f"{'-'.join(plain.split())}-eps-{epsilon:g}"


def idx(folder: str, side: str) -> dict[str, Any]:
    """An IDX pair of the shared data; `side` is train or t10k."""
    stem = DATA / folder / side
    return {
        "kind": "idx",
        "images": f"{stem}-images-idx3-ubyte.gz",
        "labels": f"{stem}-labels-idx1-ubyte.gz",
    }


def archive(work: Path, folder: str, name: str) -> dict[str, Any]:
    """An NPZ archive that `composed.prepare` or `letters.prepare` made in the work folder."""
    source: dict[str, Any] = {"kind": "npz", "path": str(work / folder / f"{name}.npz")}
    return source if folder == "letters" else source | {"captions": "captions"}


def _private(row: Row, work: Path) -> dict[str, Any]:
    if row.data:
        source, held = (
            archive(work, row.data, name)
            for name in (
                ("train", "held-out") if row.data == "letters" else ("mnist-train", "mnist-t10k")
            )
        )
    else:
        source, held = idx("mnist", "train"), idx("mnist", "t10k")
    captions = {"captioned": CLASS_TEMPLATE, "composed": TEMPLATE}.get(row.data)
    return {
        "source": source,
        "public": True,
        "capacity": CAPACITY,
        "classes": DIGITS,
        "image": {"height": 28, "width": 28, "channels": 1},
        "held_out": {"by": "source", "source": held},
        **({"captions": captions} if captions else {}),
    }


def _public(row: Row, work: Path, letters: int) -> list[dict[str, Any]]:
    if row.data == "composed":
        return [archive(work, "composed", "fashion-train")]
    fashion = idx("fashion-mnist", "train")
    if row.data == "letters":
        return [fashion]  # letters are no stand-in for what is private where they are public
    return [fashion, {"kind": "glyphs", "count": letters}]


def _representation(row: Row, size: Size) -> dict[str, Any]:
    if row.space == "pixel":
        return {"kind": "pixels", "clip_quantile": 0.5}
    return {
        "kind": "autoencoder",
        "code": 48,
        "clip_quantile": 0.5,
        "autoencoder": {
            "epochs": size.epochs, "deform": 0.6, "hidden": 512, "learning_rate": 0.01,
            "norm": True, "loss": "squares", "batch": 128, "precision": "bfloat16",
        },
    }  # fmt: skip


def _backbone(row: Row, size: Size) -> dict[str, Any]:
    text = text_of(size, WORDS.get(row.data, 1))
    return {
        "kind": "mmdit",
        "width": size.width,
        "depth": size.depth,
        "patch": size.patch,
        **({"text": text} if text else {}),
        **{key: CONSTRAINED[key] for key in row.constraints},
    }


def _stages(row: Row, size: Size) -> dict[str, Any]:
    stages: dict[str, Any] = {}
    if row.release:
        stages["moments"] = _moments(row)
    if row.train:
        kind = "moments" if row.release else "uniform"
        stages["train"] = {
            "weight": DP_SGD if row.share is None else 1 - row.share,
            "rate": size.rate,
            "steps": size.steps,
            "chunk": size.chunk,
            "multiplicity": size.draws,
            "buckets": 4,
            "ema": size.ema,
            "learning_rate": row.rate or size.rates[kind],
            **({"allocation": {}} if row.train == "planned" else {}),
        }
    return stages


def _moments(row: Row) -> dict[str, Any]:
    weight = RELEASE if row.share is None else row.share
    made: dict[str, Any] = {"weight": weight}
    if row.release == "class":
        made |= {"covariance": "class", "blocks": {"count": 0.03, "sum": 0.27, "second": 0.7}}
    elif row.release == "cells":
        made |= {"cells": {}}
    else:
        made |= {"covariance": "shared", "sensitivity": "paper", "rank": 32}
        if row.space == "pixel":
            made |= {"projection": 64}
        if row.release in FEATURES:
            made |= {"captions": {"features": row.release}}
    return {key: value for key, value in (made | dict(row.changes)).items() if value is not None}


def _distillation(row: Row, size: Size) -> dict[str, Any]:
    steps, batch, rate = size.distil
    # The paper's release is taught up to the public knee; a stronger one for all t.
    horizon = row.horizon or ("knee" if row.shared else 1.0)
    return {"steps": steps, "batch": batch, "learning_rate": rate, "horizon": horizon}
