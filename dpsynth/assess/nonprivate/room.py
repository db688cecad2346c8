"""Where a reference lies in the curator's room, its model, and who may open it."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpsynth.artifacts.files import sha256_file, write_json
from dpsynth.artifacts.nonprivate import TEXTS, Kind, reference_stamps, stamp_metadata
from dpsynth.artifacts.rooms import RunDir
from dpsynth.artifacts.samples import read_summary, summary_path
from dpsynth.artifacts.tensors import load_tensors, save_tensors
from dpsynth.errors import DpsynthError, UsageError
from dpsynth.models.frozen.adapters import start_factors
from dpsynth.models.frozen.velocity import FrozenVelocity

FORMAT = "dpsynth-nonprivate-model-1"
"""Of a model's file: no loader of a velocity model or a transformer knows it."""
SAMPLES = "dpsynth-reference-samples-1"
_CHECKPOINT = "-checkpoint-"


@dataclass(frozen=True)
class Place:
    """The files of one reference: `reference-KIND` and what stands beside it."""

    run: RunDir
    kind: Kind

    @property
    def folder(self) -> Path:
        """The images with their `metadata.csv`."""
        return self._beside("")

    @property
    def making(self) -> Path:
        """The folder while images are drawn; it becomes `folder` once it is whole and stamped."""
        return self.run.curator / f".reference-{self.kind}"

    @property
    def sheet(self) -> Path:
        """The contact sheet."""
        return self._beside(".png")

    @property
    def model(self) -> Path:
        """The model that the images are drawn from, where one was trained."""
        return self._beside(".safetensors")

    @property
    def log(self) -> Path:
        """Losses and batch sizes by step."""
        return self._beside("-training.jsonl")

    def checkpoint(self, recipe: str) -> Path:
        """State of an unfinished training of that recipe."""
        return self._beside(f"{_CHECKPOINT}{recipe[:16]}.safetensors")

    def drop_checkpoints(self, kept: Path | None = None) -> None:
        """Remove the states of training, but for one."""
        for path in self.run.curator.glob(f"reference-{self.kind}{_CHECKPOINT}*.safetensors"):
            if path != kept:
                path.unlink()

    def _beside(self, ending: str) -> Path:
        return self.run.curator / f"reference-{self.kind}{ending}"


def save_model(model: nn.Module, place: Place, recipe: str) -> None:
    """Write the weights (of a frozen prior, its factors) as a curator-only file that says so."""
    arrays = {n: v.detach().cpu().contiguous().numpy() for n, v in _learned(model).items()}
    facts = {"format": FORMAT, "room": "curator", "recipe": recipe, "stamp": TEXTS[place.kind]}
    save_tensors(place.model, arrays, facts)


def load_model(model: nn.Module, place: Place, recipe: str) -> bool:
    """Fill `model` with the kept weights; False where none of this recipe are there."""
    if not place.model.is_file():
        return False
    try:
        arrays, facts = load_tensors(place.model)
    except UsageError:  # damaged: made anew
        return False
    own = _learned(model)
    wanted = {name: tuple(value.shape) for name, value in own.items()}
    if (facts.get("format"), facts.get("recipe")) != (FORMAT, recipe):
        return False
    if wanted != {name: array.shape for name, array in arrays.items()}:
        return False
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(torch.from_numpy(np.array(arrays[name], copy=True)))
    return True


def _learned(model: nn.Module) -> dict[str, Tensor]:
    """What training makes of a model: all of its state, or the factors beside a frozen prior."""
    if isinstance(model, FrozenVelocity):
        return start_factors(model)
    return dict(model.state_dict())


def is_kept(place: Place, origin: dict[str, Any]) -> bool:
    """Whether the images of this very origin are there."""
    try:
        summary = read_summary(place.folder)
    except DpsynthError:  # a damaged summary: drawn anew
        return False
    return summary is not None and summary.get("origin") == origin


def put_in_place(place: Place, classes: list[str], origin: dict[str, Any]) -> None:
    """Stamp the finished folder `place.making` and put it where readers look, with a summary."""
    written = stamp_metadata(place.making, place.kind)
    summary = {
        "format": SAMPLES,
        "room": "curator",
        "count": int(origin["count"]),
        "classes": classes,
        "origin": origin,
        "stamp": reference_stamps(place.kind),
        "metadata_sha256": sha256_file(written),
    }
    target = summary_path(place.folder)
    target.unlink(missing_ok=True)  # first: without it, what is left counts as nobody's
    summary_path(place.making).unlink(missing_ok=True)
    if place.folder.exists():
        shutil.rmtree(place.folder)
    place.making.rename(place.folder)
    write_json(target, summary, mode=0o600)
