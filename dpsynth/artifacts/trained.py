"""The trained model of a run, out of the checkpoint that its last settled chunk of steps left.

Post-processing: a checkpoint holds what noisy gradients made of public or released weights, and
its chunk is charged and settled. NumPy alone, so that closing a run needs no torch.
"""

from collections.abc import Callable
from pathlib import Path

from dpsynth.artifacts.adapter import ADAPTER, write_adapter
from dpsynth.artifacts.files import read_json, sha256_file
from dpsynth.artifacts.lock import Lock, Slot
from dpsynth.artifacts.low_rank import Arrays, merged_into
from dpsynth.artifacts.rooms import RunDir
from dpsynth.artifacts.settled import MODEL
from dpsynth.artifacts.tensors import load_released, load_tensors, save_tensors
from dpsynth.console import counted, note
from dpsynth.errors import MissingError, ReplayError, UsageError, typed

CHECKPOINT = "dpsynth-checkpoint-1"
AVERAGE = "average/"
TRANSFORMER = "transformer.safetensors"
WARM = "warm.safetensors"
"""Start weights that learned the central images (`released.warm`)."""
LORA = "lora"
"""Checkpoints of LoRA factors say what their product is scaled by."""
# What `models.velocity` and `models.frozen` say of a flow, and `models.wavelet` of a transformer
# over tokens; the rest of a file's metadata is how it was made.
_SHAPE = ("format", "kind", "width", "depth", "dim", "classes", "dual", "sizes", "frozen")


def checkpoint_path(run: RunDir, slot: Slot) -> Path:
    """Where a chunk's checkpoint lies (curator's room)."""
    return run.curator / "checkpoints" / f"{slot.name}.safetensors"


def start_path(run: RunDir, lock: Lock) -> Path:
    """The weights that private training starts from: warm ones where the plan has central images.

    Of a plan without: distilled where it distils. On tokens it is the public transformer.
    """
    if on_tokens(lock):
        return run.public / TRANSFORMER
    if has_central(lock):
        return run.released / WARM
    return cold_path(run, lock)


def cold_path(run: RunDir, lock: Lock) -> Path:
    """The velocity model that a warm start begins with; training itself, where there is none."""
    if lock.facts["distillation"] is not None:
        return run.released / "distilled.safetensors"
    return run.public / "prior.safetensors"


def has_central(lock: Lock) -> bool:
    """Whether the plan releases central images."""
    return lock.facts["stages"].get("central") is not None


def on_tokens(lock: Lock) -> bool:
    """Whether the plan's codes are spectral tokens."""
    return bool(lock.facts["representation"]["kind"] == "tokens")


def finish_training(
    run: RunDir, lock: Lock, digest_of: Callable[[str], str | None], *, closed: bool
) -> None:
    """Make the model of the steps that settled, if any did; a closed run's model stays.

    A run that was closed without its model has it made now if that can still be done.

    `digest_of`: hash that the release of that name settled with, None while it did not.
    """
    digests = ((slot, digest_of(slot.release)) for slot in lock.stage_slots("train"))
    settled = [(slot, digest) for slot, digest in digests if digest is not None]
    if not settled:
        return
    slot, digest = settled[-1]
    if closed and ((run.released / MODEL).is_file() or not _is_settled(run, slot, digest)):
        return  # training ended by itself, or was closed without its model
    steps = finish_model(run, lock, slot, digest)
    note(f"released/{MODEL}: made of the {counted(steps, 'step')} of training that settled")


def finish_model(run: RunDir, lock: Lock, slot: Slot, digest: str) -> int:
    """Write `released/model.safetensors` as training does at its end; the steps it has seen.

    Of a frozen prior, whose factors moved, also the adapter folder beside it.

    `slot`: the chunk that settled last, with the hash `digest`. Nothing else of the curator's room
    is read, and only the very file that settled: a changed one is not what was paid for.

    Raises:
        MissingError: the checkpoint or the start weights are gone.
        ReplayError: they are not what settled, or do not belong together.
    """
    path = checkpoint_path(run, slot)
    _require_settled(run, slot, digest)
    if on_tokens(lock):
        _require_named(run)
    arrays, facts = load_tensors(path)
    start, shape = load_released(start_path(run, lock))
    moved = _moved(arrays, facts, start)
    if moved is None:
        raise ReplayError(
            f"{path.name} is no checkpoint of training that started from "
            f"{start_path(run, lock).name}",
            hint="restore both files",
        )
    metadata = {key: shape[key] for key in _SHAPE if key in shape} | {"room": "released"}
    if not on_tokens(lock):
        metadata["low"] = repr(float(shape.get("train_from", 0.0)))
    if ADAPTER in facts:
        metadata[ADAPTER] = facts[ADAPTER]
    save_tensors(run.released / MODEL, start | moved, metadata)
    if ADAPTER in facts:
        write_adapter(run.released / MODEL)
    return int(facts["step"])


def _moved(arrays: Arrays, facts: dict[str, str], start: Arrays) -> Arrays | None:
    """The weights that a checkpoint's steps moved, averaged; None where they are no such weights.

    LoRA factors are merged, as training does at its end.
    """
    found = {
        name.removeprefix(AVERAGE): array
        for name, array in arrays.items()
        if name.startswith(AVERAGE)
    }
    if facts.get("format") != CHECKPOINT or not found:
        return None
    if LORA in facts:
        try:
            return merged_into(start, found, float(facts[LORA]))
        except (UsageError, ValueError):
            return None
    fits = all(n in start and start[n].shape == array.shape for n, array in found.items())
    return found if fits else None


def _require_named(run: RunDir) -> None:
    """Refuse another public transformer than the calibration names: factors would not fit it."""
    path = run.public / TRANSFORMER
    named = read_json(run.calibration).get("transformer_sha256")
    if path.is_file() and sha256_file(path) != named:
        raise ReplayError(
            f"{path.name} is not the file that {run.calibration.name} names",
            hint="restore it: private training started from it",
        )


def _is_settled(run: RunDir, slot: Slot, digest: str) -> bool:
    path = checkpoint_path(run, slot)
    return path.is_file() and sha256_file(path) == digest


def _require_settled(run: RunDir, slot: Slot, digest: str) -> None:
    path = checkpoint_path(run, slot)
    hint = (
        f"restore curator/checkpoints/{path.name}; or give up the settled steps: "
        f"{typed('dpsynth', 'close', run.root)} --without-model"
    )
    if not path.is_file():
        raise MissingError(
            f"the checkpoint {path.name} of the last settled steps is missing: "
            "the model cannot be made of it",
            hint=hint,
        )
    if not _is_settled(run, slot, digest):
        raise ReplayError(
            f"the checkpoint {path.name} is not what the transcript settled: "
            "no model is made of it",
            hint=hint,
        )
