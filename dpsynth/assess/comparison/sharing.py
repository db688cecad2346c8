"""What runs of one comparison share, so that it is made once: public stages, and the ruler.

Speed alone. Of a public file that was copied, `pretrain` keeps what its own recipe would have
made; the cache of evaluations is keyed by the content of what it was made of.
"""

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from dpsynth.artifacts.files import canonical_json
from dpsynth.assess.comparison.entrants import Entrant
from dpsynth.public.recipes import PRIOR
from dpsynth.public.representation import GEOMETRY

CALIBRATION = "calibration.json"
CACHE = "cache"
_IMAGES = ("public", "public_seed", "representation", "tokens")
_OF_PRIVATE = ("image", "classes", "captions")
_TOKENS = ("tokenizer.safetensors", "transformer.safetensors")


def share(entrant: Entrant, others: Sequence[Entrant]) -> str | None:
    """Give a run that has no public room yet that of another, and the evaluations' cache.

    The whole room of a plan that is the same but for its budget; else code space and prior of one
    with the same public images and code space. `others` are looked at in order.

    Returns:
        The name of the run whose public files were taken; None where none fits.
    """
    measured = next((one for one in others if (one.run.curator / CACHE).is_dir()), None)
    if measured is not None:
        _take_cache(measured, entrant)
    ready = [one for one in others if one.run.calibration.is_file()]
    if entrant.run.calibration.is_file() or entrant.started:
        return None
    for one in ready:
        if one.settings == entrant.settings:
            _copy(one.run.public, entrant.run.public, _files(one.run.public))
            return one.name
    for one in ready:
        names = _common(one.facts, entrant.facts)
        if names and any((one.run.public / name).is_file() for name in names):
            _copy(one.run.public, entrant.run.public, names)
            return one.name
    return None


def _common(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Public files that plans of two methods have in common: those that both are certain to use."""
    if any("embedding" in facts["stages"] for facts in (one, other)):
        return []  # an embedding is of pixels: it has neither a code space nor a prior
    same = all(_same(one, other, key) for key in _IMAGES) and all(
        _same(one["private"], other["private"], key) for key in _OF_PRIVATE
    )
    if not same:
        return []
    prior = [PRIOR] if all(_same(one, other, key) for key in ("velocity", "prior")) else []
    return [GEOMETRY, *prior, *(_TOKENS if other.get("tokens") else ())]


def _same(one: dict[str, Any], other: dict[str, Any], key: str) -> bool:
    return canonical_json(one.get(key)) == canonical_json(other.get(key))


def _files(room: Path) -> list[str]:
    """A room's files; the calibration, which vouches for the others, last."""
    names = [path.name for path in sorted(room.iterdir()) if path.is_file()]
    return sorted((n for n in names if not n.startswith(".")), key=lambda name: name == CALIBRATION)


def _take_cache(source: Entrant, entrant: Entrant) -> None:
    """Copy what evaluations of the same private records keep: from one curator's room to another.

    One network and one set of references then measures every run.
    """
    entrant.run.make_rooms()
    kept, own = source.run.curator / CACHE, entrant.run.curator / CACHE
    own.mkdir(mode=0o700, exist_ok=True)
    _copy(kept, own, (path.name for path in kept.iterdir() if path.is_file()))


def _copy(source: Path, target: Path, names: Iterable[str]) -> None:
    """Copy files that the target lacks, each wholly or not at all."""
    target.mkdir(parents=True, exist_ok=True)
    for name in names:
        if (source / name).is_file() and not (target / name).exists():
            part = target / f".{name}.part"
            shutil.copy2(source / name, part)
            part.replace(target / name)
