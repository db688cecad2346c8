"""A plan's facts: its sections as plain JSON values without paths, and back.

What is hashed, locked and handed out. Where bytes lie on one machine is no fact.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dpsynth.planning.section import LATER

_PATHS = {
    "idx": ("images", "labels"),
    "folder": ("path",),
    "npz": ("path",),
    "diffusers": ("model",),
}
_ENCODED = "sentence"  # a caption release with a text encoder's folder
_ENCODER_WIDTH = "encoder_width"  # said of a transformer with one, and of no other
_FREE = "free"  # captions of any form


def with_paths(value: Any) -> Any:
    """Facts with a placeholder in each path's place."""
    if isinstance(value, dict):
        placeholders = dict.fromkeys(_PATHS.get(str(value.get("kind")), ()), "-")
        if value.get("features") == _ENCODED or value.get(_ENCODER_WIDTH) is not None:
            placeholders["encoder"] = "-"
        found = {**placeholders, **{key: with_paths(item) for key, item in value.items()}}
        return _drawn_for(found) if _is_free(found) else found
    return [with_paths(item) for item in value] if isinstance(value, list) else value


def _is_free(facts: dict[str, Any]) -> bool:
    """Whether these are a plan's facts, its captions free: images are drawn for a file's."""
    private = facts.get("private")
    captions = private.get("captions") if isinstance(private, dict) else None
    return isinstance(captions, dict) and captions.get("kind") == _FREE


def _drawn_for(facts: dict[str, Any]) -> dict[str, Any]:
    sampling = facts.get("sampling", {})
    return (
        facts | {"sampling": {"captions": "-", **sampling}} if isinstance(sampling, dict) else facts
    )


def without_paths(section: BaseModel) -> dict[str, Any]:
    """A section's values, paths and later fields that hold their default left out."""
    fields = type(section).model_fields
    return {
        key: _plain(value)
        for key, value in section
        if not isinstance(value, Path) and not _unsaid(fields[key], value)
    }


def _unsaid(field: FieldInfo, value: Any) -> bool:
    """Whether a later field holds its default: plans older than it keep their hash."""
    extra = field.json_schema_extra
    return isinstance(extra, dict) and LATER in extra and bool(value == field.default)


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return without_paths(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value
