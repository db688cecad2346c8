"""Named arrays in safetensors files, written atomically, each stamped with its room.

NumPy only: nothing here reaches torch.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpsynth.artifacts.files import again, write_atomic
from dpsynth.errors import MissingError, UsageError

if TYPE_CHECKING:
    import numpy as np

    Arrays = dict[str, np.ndarray[Any, Any]]

ROOMS = ("public", "released", "curator")


def save_tensors(path: Path, arrays: "Arrays", metadata: dict[str, str]) -> None:
    """Write arrays and text metadata; `metadata["room"]` says who may see the file.

    Raises UsageError without a known room, or when the disk refuses.
    """
    if metadata.get("room") not in ROOMS:
        raise UsageError(f"{path.name} has room {metadata.get('room')!r}, expected one of {ROOMS}")
    mode = 0o600 if metadata["room"] == "curator" else 0o666
    write_atomic(path, tensor_bytes(arrays, metadata), mode=mode)


def tensor_bytes(arrays: "Arrays", metadata: dict[str, str]) -> bytes:
    """A safetensors file of arrays and text metadata: the same bytes of the same values."""
    import numpy as np
    from safetensors.numpy import save

    packed = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    return _sorted_header(save(packed, metadata=metadata))


def _sorted_header(data: bytes) -> bytes:
    """The same file with sorted metadata: safetensors writes it in an order of its own mood."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    metadata = dict(sorted(header.pop("__metadata__", {}).items()))
    ordered = json.dumps({"__metadata__": metadata, **header}, separators=(",", ":")).encode()
    ordered += b" " * (-len(ordered) % 8)  # tensors stay aligned
    return len(ordered).to_bytes(8, "little") + ordered + data[8 + size :]


def load_tensors(path: Path) -> "tuple[Arrays, dict[str, str]]":
    """Read arrays and metadata.

    Raises MissingError when there is no file (or no safetensors), UsageError when damaged.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise MissingError(
            "safetensors is not installed", hint="pip install -e '.[torch]'"
        ) from None
    if not path.is_file():
        raise MissingError(f"{path.name} is missing from {path.parent.name}/", hint=again(path))
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = dict(file.metadata() or {})
            return {name: file.get_tensor(name) for name in file.keys()}, metadata  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path.name} in {path.parent.name}/ is damaged: it is no safetensors file",
            hint=again(path) or "run again the step that wrote it",
        ) from error


def load_released(path: Path) -> "tuple[Arrays, dict[str, str]]":
    """Read a file that may be handed out. Raises UsageError for a curator-only one."""
    arrays, metadata = load_tensors(path)
    room = metadata.get("room")
    if room not in ("public", "released"):
        raise UsageError(
            f"{path.name} is stamped {room or 'nothing'!r}: it is not for release",
            hint="use the file of the same step in released/",
        )
    return arrays, metadata


def load_release(
    path: Path, form: str, by: str = "release-moments"
) -> "tuple[Arrays, dict[str, str]]":
    """Read what the command `by` wrote in the format `form`. Raises UsageError for another one."""
    arrays, metadata = load_released(path)
    if metadata.get("format") != form:
        raise UsageError(
            f"{path.name} has format {metadata.get('format')!r}, expected {form!r}",
            hint=f"ask for the file that `dpsynth {by}` wrote",
        )
    return arrays, metadata
