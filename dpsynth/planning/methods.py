"""`method:`, the one line of a plan that changes the method and nothing else (docs/methods.md).

A plan may hold the settings of every method at once. The line takes those that its method needs,
as stages, and drops the others: what is hashed and locked holds stages alone, and the line.
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, get_args

from dpsynth.planning.central import Central
from dpsynth.planning.embedding import MOST_NUMBERS, Embedding
from dpsynth.planning.evolution import Evolution
from dpsynth.planning.release import Moments
from dpsynth.planning.section import Section, misfit
from dpsynth.planning.training import Distillation, Train

if TYPE_CHECKING:
    from dpsynth.planning.schema import Plan

Method = Literal["straightdp", "dp-sgd", "merf", "hermite", "ntk", "evolution", "central-images"]
METHODS: tuple[str, ...] = get_args(Method)

KINDS = {"merf": "fourier", "hermite": "hermite", "ntk": "tangent"}
"""Feature map of each method of the embedding family."""
_STAGES: dict[str, tuple[str, ...]] = {
    "straightdp": ("moments", "train"),
    "dp-sgd": ("train",),
    **dict.fromkeys(KINDS, ("embedding",)),
    "evolution": ("votes",),
    "central-images": ("central", "train"),
}
_SECTIONS = {"embedding": "embedding", "votes": "evolution", "central": "central"}
"""Top-level section with the settings of each stage that has one."""
_CHOSEN = {name for stages in _STAGES.values() for name in stages}
"""Stages that a method takes or drops; `evaluation` stays under every one."""
_DRAWS = {"embedding": "generator", "votes": "population"}
"""Sampling method of plans with each stage; the others draw by a flow, tokens or a release."""
_UNREAD = {
    "generator": ("start", "steps", "guidance", "sharpen", "captions"),
    "population": ("start", "sharpen", "captions"),
}
"""Keys of `sampling` that say nothing of a generator's images, or of a population's."""


class _Stages(Section):
    moments: Moments | None = None
    embedding: Embedding | None = None
    votes: Evolution | None = None
    central: Central | None = None
    train: Train | None = None


class _Declared(Section):
    """All settings of methods that a plan may hold, each sound by itself also where dropped."""

    embedding: Embedding | None = None
    evolution: Evolution | None = None
    central: Central | None = None
    distillation: Distillation | None = None
    stages: _Stages = _Stages()


def with_method(values: Any) -> Any:
    """A plan's raw values as its line `method:` makes them; facts of a plan stay as they are.

    Raises a ValueError where settings are at fault, those that are dropped too. What else is wrong
    is found later.
    """
    if not isinstance(values, dict):
        return values
    method, stages = values.get("method"), values.get("stages")
    known = isinstance(method, str) and method in _STAGES
    if known and (stages is None or isinstance(stages, dict)):
        values = _made(values, str(method), stages or {})
    return _without_codes(values)


def _made(values: dict[str, Any], method: str, stages: dict[str, Any]) -> dict[str, Any]:
    named = {key: values[key] for key in (*_SECTIONS.values(), "distillation") if key in values}
    _Declared.model_validate({**named, "stages": {k: stages[k] for k in _CHOSEN & stages.keys()}})
    wanted, declared = _STAGES[method], {k: v for k, v in stages.items() if k not in _CHOSEN}
    own = [name for name in wanted if name not in _SECTIONS]
    if own and all(stages.get(name) is None for name in own):
        raise misfit(
            f"method: {method} needs {' or '.join(f'stages.{name}' for name in own)}",
            "method",
            hint="add `train: {rate: 0.02, steps: 500}` under `stages:`",
        )
    declared |= {name: _settings(values, stages, name, method) for name in wanted}
    made = {key: value for key, value in values.items() if key not in _SECTIONS.values()}
    made["stages"] = {key: value for key, value in declared.items() if value is not None}
    if method == "straightdp":
        return made
    made.pop("distillation", None)
    return _drawn(made, method)


def _settings(
    values: dict[str, Any], stages: dict[str, Any], name: str, method: str
) -> dict[str, Any] | None:
    """Raw settings of a stage that the method takes; None for one that is not declared."""
    section, own = _SECTIONS.get(name), stages.get(name)
    if section is None:  # moments and train stand under `stages:` alone
        if own is None or method == "straightdp":
            return own
        return {key: value for key, value in own.items() if key != "allocation"}
    given = values.get(section)
    if own is not None and given is not None:
        raise misfit(
            f"stages.{name} and {section} are both there, and are the same settings",
            section,
            hint=f"keep `{section}:` at the top level",
        )
    found: dict[str, Any] = dict(own or given or {})
    if method not in KINDS:
        return found
    kind = KINDS[method]
    if found.get("kind", kind) != kind:
        raise misfit(
            f"method: {method} has features of kind {kind}, and {section}.kind is {found['kind']}",
            f"{section}.kind",
            f"stages.{name}.kind",
            hint="leave `kind` out: the method says it",
        )
    return {"kind": kind, **found}


def _drawn(values: dict[str, Any], method: str) -> dict[str, Any]:
    """The values with the sampling that fits the method, keys that it would not read dropped."""
    space, sampling = values.get("representation"), values.get("sampling", {})
    if not isinstance(sampling, dict):
        return values
    tokens = isinstance(space, dict) and space.get("kind") == "tokens"
    draws = _DRAWS.get(_STAGES[method][0], "tokens" if tokens else "flow")
    unread = _UNREAD.get(draws, ("start",))
    kept = {key: value for key, value in sampling.items() if key not in unread}
    return {**values, "sampling": {**kept, "method": draws}}


def _without_codes(values: dict[str, Any]) -> dict[str, Any]:
    """An embedding is of pixels: its plan needs no representation, and tokens say nothing."""
    stages = values.get("stages")
    if not isinstance(stages, dict) or stages.get("embedding") is None:
        return values
    space, made = values.get("representation"), {**values}
    tokens = isinstance(space, dict) and space.get("kind") == "tokens"
    if values.get("method") in KINDS:
        made.pop("tokens", None)
    else:
        tokens = False  # declared by hand: refused, not dropped
    if space is None or tokens:
        made["representation"] = {"kind": "pixels"}
    return made


def require_method(plan: "Plan") -> None:
    """Raise a ValueError that names the keys of methods which do not fit together."""
    for section in ("embedding", "evolution", "central"):
        if getattr(plan, section) is not None:
            raise misfit(
                f"{section}: settings of a method, and the plan has no `method:`",
                section,
                hint=f"add `method: {_methods_of(section)}`, or leave `{section}` out",
            )
    for stage, draws in _DRAWS.items():
        _require_draws(plan, stage, draws)
    if plan.stages.embedding is not None:
        _require_embedding(plan, plan.stages.embedding)
    if plan.stages.votes is not None:
        _require_votes(plan, plan.stages.votes)
    for stage in (*_DRAWS, "central"):
        if getattr(plan.stages, stage) is not None:
            _require_classes(plan, stage)


def _methods_of(section: str) -> str:
    """A method that reads this top-level section."""
    stage = next(stage for stage, name in _SECTIONS.items() if name == section)
    return next(method for method, stages in _STAGES.items() if stage in stages)


def _require_draws(plan: "Plan", stage: str, draws: str) -> None:
    method, there = plan.sampling.method, getattr(plan.stages, stage) is not None
    if method == draws and not there:
        raise misfit(
            f"sampling.method: {draws} needs stages.{stage}",
            "sampling.method",
            hint=f"declare stages.{stage}, or write `sampling: {{method: flow}}`",
        )
    if there and method != draws:
        raise misfit(
            f"sampling.method: {method}, and images of stages.{stage} come from its {draws}",
            "sampling.method",
            "sampling",
            f"stages.{stage}",
            hint=f"write `sampling: {{method: {draws}}}`",
        )
    for key in _changed(plan.sampling, _UNREAD[draws]) if there else ():
        raise misfit(
            f"sampling.{key} says nothing of images from a {draws}",
            f"sampling.{key}",
            hint=f"leave `{key}` out",
        )


def _changed(section: Section, keys: tuple[str, ...]) -> Iterator[str]:
    """Those of the keys that hold another value than their default: locks spell defaults out."""
    fields = type(section).model_fields
    yield from (key for key in keys if getattr(section, key) != fields[key].default)


def _require_classes(plan: "Plan", stage: str) -> None:
    """These stages speak of classes; what they release has no captions and no tokens."""
    if plan.private.captions is not None:
        raise misfit(
            f"stages.{stage} is by class, and the records have captions",
            "private.captions",
            hint="leave `captions` out, or write `method: straightdp`",
        )
    if plan.representation.kind == "tokens" or (plan.tokens is not None and stage != "central"):
        raise misfit(
            f"stages.{stage}: of images or their codes, and this plan has tokens",
            f"stages.{stage}",
            "method",
            hint="leave `tokens` out and write another representation, such as `{kind: pixels}`",
        )


def _require_embedding(plan: "Plan", embedding: Embedding) -> None:
    image, classes = plan.private.image, len(plan.private.classes)
    dim = embedding.dim(image.height, image.width, image.channels)
    numbers = classes * (1 + dim)
    if numbers > MOST_NUMBERS:
        key = {"fourier": "features", "hermite": "order", "tangent": "width"}[embedding.kind]
        raise misfit(
            f"the embedding has {numbers} numbers ({classes} classes of {dim} features); at most "
            f"{MOST_NUMBERS} can be released",
            f"embedding.{key}",
            f"stages.embedding.{key}",
            "embedding",
            "stages.embedding",
            "method",
            hint=f"lower `{key}`",
        )
    pixels = math.prod((image.height, image.width, image.channels))
    most = pixels * (pixels - 1) // 2
    if embedding.kind == "hermite" and embedding.pairs > most:
        raise misfit(
            f"embedding.pairs is {embedding.pairs}, and {pixels} pixels make {most} pairs",
            "embedding.pairs",
            "stages.embedding.pairs",
            "embedding",
            "stages.embedding",
            "method",
            hint=f"write `pairs: {most}` or less",
        )


def _require_votes(plan: "Plan", votes: Evolution) -> None:
    members = len(plan.private.classes) * votes.population
    if members > MOST_NUMBERS:
        raise misfit(
            f"the population has {members} members; at most {MOST_NUMBERS} can be voted for",
            "evolution.population",
            "stages.votes.population",
            hint="lower `population`",
        )
