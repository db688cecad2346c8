"""The adapter folder of a run: its LoRA factors as peft and diffusers load them, NumPy alone.

It follows from `model.safetensors` and nothing else: post-processing of a released file.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from dpsynth.artifacts.files import canonical_json, readable_json, write_changed
from dpsynth.artifacts.tensors import load_released, tensor_bytes
from dpsynth.errors import UsageError

if TYPE_CHECKING:
    from dpsynth.artifacts.low_rank import Arrays

FOLDER = "adapter"
CONFIG = "adapter_config.json"
PEFT = "adapter_model.safetensors"
DIFFUSERS = "pytorch_lora_weights.safetensors"
FILES = (CONFIG, PEFT, DIFFUSERS)
ADAPTER = "adapter"
"""Metadata key of files with factors: `adapter_facts`, as JSON."""
ROOT = "transformer."
"""What names of factors begin with: the model's part that they stand in, as diffusers has it."""
_NAME = ".default."  # peft's name of an adapter that was given none
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"


def adapter_facts(rank: int, scale: float, base: str | None, revision: str | None) -> str:
    """What a file with factors says of them, so that a folder can be made of it.

    base: the hub id of the model that they stand in, at `revision`; None for a folder, which is
    nobody else's business.

    >>> adapter_facts(4, 8.0, "a/b", None)
    '{"base":"a/b","rank":4,"revision":null,"scale":8.0}'
    """
    facts = {"rank": rank, "scale": scale, "base": base, "revision": revision}
    return canonical_json(facts).decode()


def factors_of(arrays: "Arrays") -> "Arrays":
    """The factors among a file's arrays, by layer: `blocks.0.attn.to_q.lora_A.weight` (rank, in).

    Raises UsageError where factors do not come in pairs of one rank.
    """
    found = {
        name.removeprefix(ROOT).replace(_NAME, "."): array
        for name, array in arrays.items()
        if name.startswith(ROOT) and (".lora_A." in name or ".lora_B." in name)
    }
    layers = layers_of(found)
    if not layers or {*found} != {layer + part for layer in layers for part in (_DOWN, _UP)}:
        raise UsageError("these are no LoRA factors in pairs")
    ranks = {len(found[layer + _DOWN]) for layer in layers}
    if ranks | {found[layer + _UP].shape[-1] for layer in layers} != ranks or len(ranks) != 1:
        raise UsageError("these LoRA factors are of several ranks")
    return found


def layers_of(factors: "Arrays") -> list[str]:
    """The layers that factors stand beside, sorted."""
    return sorted(name.removesuffix(_DOWN) for name in factors if name.endswith(_DOWN))


def write_adapter(model: Path) -> Path | None:
    """Write the folder `adapter/` beside a released model; None where the model has no factors.

    `adapter_config.json` and `adapter_model.safetensors` are what `peft.PeftModel.from_pretrained`
    loads, `pytorch_lora_weights.safetensors` what `load_lora_weights` of a pipeline does. The
    latter has the scale within B, as diffusers before 0.34 knows of no other than 1. The same
    bytes of the same model; each file is wholly there or not at all.

    Raises:
        MissingError: no such model.
        UsageError: it is for the curator alone, or its factors are damaged.
    """
    arrays, facts = load_released(model)
    if ADAPTER not in facts:
        return None
    try:
        said = json.loads(facts[ADAPTER])
        rank, scale = int(said["rank"]), float(said["scale"])
        base, revision = said["base"], said["revision"]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{model.name} is damaged: it does not say how factors are used"
        ) from error
    factors, folder = factors_of(arrays), model.parent / FOLDER
    metadata = {"format": "pt", "room": "released"}
    scaled = {
        name: array * array.dtype.type(scale / rank) if name.endswith(_UP) else array
        for name, array in factors.items()
    }
    for file, prefix, held in (
        (PEFT, "base_model.model.", factors),
        (DIFFUSERS, ROOT, scaled),
    ):
        named = {prefix + name: array for name, array in held.items()}
        write_changed(folder / file, tensor_bytes(named, metadata))
    config = _config(rank, scale, layers_of(factors), base, revision)
    write_changed(folder / CONFIG, readable_json(config))
    return folder


def _config(
    rank: int, scale: float, layers: list[str], base: str | None, revision: str | None
) -> dict[str, object]:
    """Peft's LoraConfig; what is left out has peft's default."""
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base,
        "revision": revision,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": int(scale) if scale == int(scale) else scale,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "target_modules": layers,
    }
