"""The plan of a lock as tables: what matters first, then every key."""

from collections.abc import Iterator, Mapping
from typing import Any

from dpsynth.artifacts.lock import Lock
from dpsynth.planning.units import unit_words
from dpsynth.released.page.render import number

_KINDS = ("kind", "method", "by", "probe")
_STAGE_KEYS = (
    "rate", "steps", "clip", "multiplicity", "covariance", "projection", "probe", "weight",
)  # fmt: skip
_SAMPLING_KEYS = ("method", "count", "steps", "guidance", "sharpen")
_DRAWN_KEYS = ("method", "count", "sharpen")  # from the release itself: no flow takes steps

Rows = list[tuple[str, str]]


def essentials(lock: Lock) -> Rows:
    """What a reader asks of a plan first, as (name, value); absent keys have no row."""
    return [(name, value) for name, value in _essentials(lock.facts, lock.budget) if value]


def every_key(facts: Mapping[str, Any]) -> Rows:
    """All of a plan, one row a key, by dotted path.

    >>> every_key({"budget": {"epsilon": 3.0}, "public": [{"kind": "letters"}], "cap": None})
    [('budget.epsilon', '3'), ('public.1.kind', 'letters'), ('cap', '–')]
    """
    return list(_flat(facts, ""))


def _essentials(facts: Mapping[str, Any], budget: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    private, space = _part(facts, "private"), _part(facts, "representation")
    image, held_out = _part(private, "image"), _part(private, "held_out")
    yield "budget", f"epsilon {number(budget['epsilon'])}, delta {number(budget['delta'])}"
    yield "neighbours", f"{budget['adjacency'].replace('-', ' ')} {unit_words(budget['unit'])}"
    source = _part(private, "source").get("kind", "?")
    openly = "declared public" if private.get("public") else "private"
    yield "private source", f"{source}, {openly}; {number(private.get('capacity'))} declared"
    sides = [number(image.get(side)) for side in ("height", "width", "channels")]
    yield "images", " × ".join(sides)
    yield "classes", ", ".join(map(str, private.get("classes") or ()))
    yield "held out", _said(held_out, ("by", "fraction"))
    yield "public sources", ", ".join(_said(s, ("kind", "count")) for s in facts.get("public", ()))
    yield "code space", _said(space, ("kind", "code", "clip_quantile"))
    for stage, settings in _part(facts, "stages").items():
        if settings is not None:
            yield f"stage {stage}", _said(settings, _STAGE_KEYS) or "as by default"
    yield "split of the budget", f"by {facts.get('split', 'noise')}"
    if facts.get("distillation"):
        yield "distillation", _said(facts["distillation"], ("steps", "horizon"))
    sampling = _part(facts, "sampling")
    drawn = _DRAWN_KEYS if sampling.get("method") == "release" else _SAMPLING_KEYS
    yield "sampling", _said(sampling, drawn)


def _said(part: Mapping[str, Any], keys: tuple[str, ...]) -> str:
    """Some keys of a section in a line; those that say which kind it is stand without their name.

    >>> _said({"kind": "pca", "code": 40, "unknown": 1}, ("kind", "code"))
    'pca, code 40'
    """
    found = [(key, part[key]) for key in keys if part.get(key) is not None]
    said = [number(v) if k in _KINDS else f"{k.replace('_', ' ')} {number(v)}" for k, v in found]
    return ", ".join(said)


def _part(facts: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = facts.get(key)
    return found if isinstance(found, Mapping) else {}


def _flat(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and any(isinstance(item, Mapping | list) for item in value):
        for place, item in enumerate(value, start=1):
            yield from _flat(item, f"{path}.{place}")
    else:
        yield path, number(value, 8)
