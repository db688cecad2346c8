"""A finished world as a file of arrays, for its owner alone: so that an audit can go on later.

No pickle: safetensors, with what is no array as JSON in its metadata.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from dpsynth.artifacts.tensors import load_tensors, save_tensors
from dpsynth.assess.audit.worlds import (
    Canaries,
    Observed,
    Reference,
    Statistic,
    WhiteBox,
    World,
)
from dpsynth.errors import UsageError
from dpsynth.models.velocity import build_for
from dpsynth.planning.schema import Plan

FORMAT = "dpsynth-audit-world-1"
Arrays = dict[str, NDArray[Any]]
_CANARIES = ("images", "labels", "codes", "included")
_STATISTIC = ("noisy", "known", "places", "values")
_MODEL = "model/"


def save_world(path: Path, canaries: Canaries, observed: Observed) -> None:
    """Write what a world shows, and its coins, atomically with mode 0600."""
    arrays: Arrays = {f"canaries/{name}": getattr(canaries, name) for name in _CANARIES}
    facts: dict[str, Any] = {"statistics": None, "gradients": None, "low": observed.low}
    if observed.moments is not None:
        facts["statistics"] = [[one.release, one.part, one.std] for one in observed.moments]
        for number, one in enumerate(observed.moments):
            arrays |= {f"statistic/{number}/{name}": getattr(one, name) for name in _STATISTIC}
    if (seen := observed.gradients) is not None:
        facts["gradients"] = [seen.std, seen.rate]
        arrays |= {"gradients/sums": seen.sums, "gradients/clips": seen.clips}
    if observed.model is not None:
        arrays |= {
            _MODEL + name: value.detach().cpu().contiguous().numpy()
            for name, value in observed.model.state_dict().items()
        }
    if observed.samples is not None:
        arrays |= {"samples/images": observed.samples[0], "samples/labels": observed.samples[1]}
    metadata = {"format": FORMAT, "room": "curator", "facts": json.dumps(facts)}
    save_tensors(path, arrays, metadata)


def load_world(path: Path, plan: Plan) -> tuple[Canaries, Observed]:
    """Read a world of `plan` back.

    Raises:
        MissingError: there is no such file.
        UsageError: it is damaged, or of another plan or version.
    """
    arrays, metadata = load_tensors(path)
    try:
        if metadata.get("format") != FORMAT:
            raise ValueError("format")
        facts = json.loads(metadata["facts"])
        canaries = Canaries(*(arrays[f"canaries/{name}"] for name in _CANARIES))
        return canaries, Observed(
            moments=_statistics(arrays, facts["statistics"]),
            gradients=_gradients(arrays, facts["gradients"]),
            model=_model(arrays, plan),
            low=float(facts["low"]),
            samples=_samples(arrays),
        )
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise UsageError(
            f"{path.name} is no world of this audit", hint="remove it, then: dpsynth audit RUN"
        ) from error


def as_reference(world: World) -> Reference:
    """A world as a reference model. Raises UsageError where it shows no model."""
    if world.observed.model is None:
        raise UsageError(f"the world {world.name} shows no model")
    return Reference(world.canaries.included, world.observed.model, world.observed.low)


def _statistics(arrays: Arrays, facts: list[list[Any]] | None) -> tuple[Statistic, ...] | None:
    if facts is None:
        return None
    found = []
    for number, (release, part, std) in enumerate(facts):
        noisy, known, places, values = (arrays[f"statistic/{number}/{n}"] for n in _STATISTIC)
        found.append(Statistic(release, part, noisy, known, float(std), places, values))
    return tuple(found)


def _gradients(arrays: Arrays, facts: list[float] | None) -> WhiteBox | None:
    if facts is None:
        return None
    std, rate = facts
    return WhiteBox(arrays["gradients/sums"], arrays["gradients/clips"], std, rate)


def _samples(arrays: Arrays) -> tuple[NDArray[np.uint8], NDArray[np.int64]] | None:
    if "samples/images" not in arrays:
        return None
    return arrays["samples/images"], arrays["samples/labels"]


def _model(arrays: Arrays, plan: Plan) -> nn.Module | None:
    weights = {
        name.removeprefix(_MODEL): torch.from_numpy(np.array(value, copy=True))
        for name, value in arrays.items()
        if name.startswith(_MODEL)
    }
    if not weights:
        return None
    model = build_for(plan)
    model.load_state_dict(weights)
    return model.eval()
