"""Frozen velocity models in files: prompts, mean and LoRA factors; the weights stay where they are.

`public/prior.safetensors` is one, and so is every model that training makes of it. The file says
by hash which weights it belongs to.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from dpsynth.artifacts.tensors import load_tensors, save_tensors
from dpsynth.errors import UsageError
from dpsynth.models.frozen.adapters import add_factors
from dpsynth.models.frozen.checkpoint import (
    Checkpoint,
    loading,
    open_checkpoint,
    require_weights,
)
from dpsynth.models.frozen.families import FAMILIES, Prompts
from dpsynth.models.frozen.machine import machine
from dpsynth.models.frozen.schedule import Schedule
from dpsynth.models.frozen.velocity import FrozenVelocity, is_factor, shared_copy
from dpsynth.planning.schema import Plan

FORMAT = "dpsynth-frozen-1"
FACTS = "frozen"
"""Metadata key: family, latent shape, schedule, types and the weights' hash, as JSON."""
MEAN, PROMPT = "mean", "prompt."
_transformers: dict[tuple[str, str, str], nn.Module] = {}


def build_frozen(
    plan: Plan, prompts: Prompts, mean: "np.ndarray[Any, Any] | None" = None
) -> FrozenVelocity:
    """The plan's frozen prior for codes about `mean` (d,), the origin if None; without factors.

    Its weights are loaded once in a process. `prompts`: of the conditions, and the empty one last.

    Raises:
        MissingError, PlanError, UsageError: see `open_checkpoint` and `Family.schedule`; or this
            machine has not the device that was asked for.
    """
    _ = machine().torch_device  # before anything is written that would need it
    found, prior = open_checkpoint(plan), plan.frozen
    assert prior is not None
    latent, family = prior.latent, FAMILIES[prior.family]
    centre = np.zeros(latent.dim) if mean is None else mean
    with loading("scheduler", f"see scheduler_config.json and config.json below {found.folder}"):
        schedule = family.schedule(found, latent.height, latent.width)
    return FrozenVelocity(
        _transformer(found),
        prior.family,
        (latent.channels, latent.height, latent.width),
        prompts,
        torch.from_numpy(np.array(centre, np.float32)),
        schedule=schedule,
        weights_sha256=found.weights_sha256,
    ).eval()


def with_factors(model: FrozenVelocity, plan: Plan) -> FrozenVelocity:
    """The model with new LoRA factors where the plan trains some: A by the public seed, B zero."""
    train = plan.stages.train
    if train is not None and train.parameters == "lora":
        add_factors(model.transformer, train.lora, plan.public_seed)
    return model


def save_frozen(model: FrozenVelocity, path: Path, *, room: str, **facts: str) -> None:
    """Write prompts, mean and factors atomically; `facts` are more metadata."""
    arrays = {name: rows.numpy() for name, rows in model.prompts.items()}
    arrays[MEAN] = model.mean.cpu().numpy()
    for name, value in model.named_parameters():
        if is_factor(name):
            arrays[name] = value.detach().float().cpu().contiguous().numpy()
    said = {
        "family": model.family,
        "latent": list(model.shape),
        "schedule": asdict(model.schedule),
        "weights_sha256": model.weights_sha256,
    }
    metadata = {**facts, "format": FORMAT, FACTS: json.dumps(said, sort_keys=True), "room": room}
    save_tensors(path, arrays, metadata)


def load_frozen(path: Path, plan: Plan) -> tuple[FrozenVelocity, dict[str, str]]:
    """The plan's frozen model from a file, in eval mode, and the file's metadata.

    Raises:
        MissingError: no such file, or the checkpoint is not here.
        PlanError: the checkpoint's weights are others than the file names.
        UsageError: the file is of another plan, or damaged.
    """
    arrays, metadata = load_tensors(path)
    prior, again = plan.frozen, "start a new run folder with --run, then: dpsynth pretrain RUN"
    assert prior is not None
    try:
        said = json.loads(metadata[FACTS])
        latent = (prior.latent.channels, prior.latent.height, prior.latent.width)
        fits = (said["family"], tuple(said["latent"])) == (prior.family, latent)
        if metadata.get("format") != FORMAT or not fits:
            raise ValueError("format")
        require_weights(open_checkpoint(plan), str(said["weights_sha256"]))
        model = build_frozen(plan, _prompts_in(arrays), np.array(arrays[MEAN], np.float32))
        if model.classes != plan.private.conditions:
            raise ValueError("conditions")
        model.schedule = Schedule(**said["schedule"])
        with_factors(model, plan)
        _fill(model, {name: array for name, array in arrays.items() if is_factor(name)})
    except (KeyError, ValueError, TypeError) as error:
        raise UsageError(f"{path.name} does not fit the plan's frozen prior", hint=again) from error
    return model.eval(), metadata


def stored_prompts(path: Path) -> Prompts:
    """The prompts that a file of a frozen model keeps."""
    return _prompts_in(load_tensors(path)[0])


def _prompts_in(arrays: "dict[str, np.ndarray[Any, Any]]") -> Prompts:
    return {n: torch.from_numpy(np.array(a)) for n, a in arrays.items() if n.startswith(PROMPT)}


@torch.no_grad()
def _fill(model: FrozenVelocity, factors: "dict[str, np.ndarray[Any, Any]]") -> None:
    own = {name: p for name, p in model.named_parameters() if is_factor(name)}
    if {n: tuple(p.shape) for n, p in own.items()} != {n: a.shape for n, a in factors.items()}:
        raise ValueError("factors")
    for name, value in own.items():
        value.copy_(torch.from_numpy(np.array(factors[name], np.float32)))


def _transformer(found: Checkpoint) -> nn.Module:
    """The checkpoint's transformer, whose weights are read once in a process."""
    settings = machine()
    key = (str(found.folder), found.weights_sha256, settings.dtype)
    if key not in _transformers:
        _transformers.clear()  # of one at a time: they are large
        _transformers[key] = FAMILIES[found.family].transformer(found, settings.torch_dtype)
    return shared_copy(_transformers[key])
