"""Whether the parts of a plan that speak of tokens fit together."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dpsynth.planning.section import Section, misfit
from dpsynth.planning.tokens import Tokens, require_tokens
from dpsynth.planning.training import Prior

if TYPE_CHECKING:
    from dpsynth.planning.schema import Plan
    from dpsynth.planning.training import Train

KIND = "tokens"
"""Representation and sampling method of plans whose training learns tokens."""
_UNREAD = {
    "representation": ("clip_quantile", "autoencoder"),
    "sampling": ("start", "steps", "sharpen", "augment"),
}
"""Keys that say nothing of tokens: their codes have no norm, and decoding finishes an image."""
_OF_TOKENS = ("temperature", "top_k")


def with_token_numbers(values: Any) -> Any:
    """A plan's raw values with what training on tokens fixes, where it is left out.

    One time bucket, for there are no times; and one image a step of units that are one record.
    What is wrong in the values is found later.
    """
    try:
        train, unit = values["stages"]["train"], values["budget"].get("unit", "record")
        if values["representation"]["kind"] != KIND:
            return values
        fixed = {"buckets": 1} | ({"multiplicity": 1} if unit == "record" else {})
        stages = {**values["stages"], "train": {**fixed, **train}}
    except (TypeError, KeyError, AttributeError):
        return values
    return {**values, "stages": stages}


def require_token_plan(plan: "Plan") -> None:
    """Raise a ValueError that names the keys which do not fit together."""
    learned, tokens = plan.representation.kind == KIND, plan.tokens
    if plan.sampling.method == KIND and not learned:
        raise misfit(
            "sampling.method: tokens draws from a transformer of tokens, and representation.kind "
            f"is {plan.representation.kind}",
            "sampling.method",
            hint="write `representation: {kind: tokens}`, or another method",
        )
    if tokens is None:
        _require_no_tokens(plan, learned)
    else:
        require_tokens(tokens, plan.private.image.height, plan.private.image.width)
    if tokens is not None and isinstance(plan.prior, Prior) and plan.prior.steps == 0:
        raise misfit(
            "prior.steps: 0 leaves the transformer of tokens untaught, and public images teach it",
            "prior.steps",
            hint="write `steps: 500` or more, or leave it out",
        )
    if learned:
        _require_learned(plan)
        return
    if plan.stages.train is not None and plan.frozen is None:
        _require_flow(plan.stages.train, plan.velocity.kind)
    if tokens is not None:
        _require_completed(plan, tokens)


def _require_no_tokens(plan: "Plan", learned: bool) -> None:
    if learned:
        raise misfit(
            "representation.kind: tokens needs the section `tokens`",
            "representation.kind",
            hint="add `tokens: {wavelet: haar, levels: 3}` at the top level",
        )
    for key in _changed(plan.sampling, _OF_TOKENS):
        raise misfit(
            f"sampling.{key}: only for plans with a section `tokens`",
            f"sampling.{key}",
            hint=f"leave `{key}` out",
        )


def _require_learned(plan: "Plan") -> None:
    """Training learns tokens: no moments of numbers, no flow, no times."""
    train = plan.stages.train
    if plan.stages.moments is not None:
        raise misfit(
            "stages.moments: codes of kind tokens are no numbers whose moments could be released",
            "stages.moments",
            hint="remove `moments`, or write `kind: wavelet` for moments of the LL0 band",
        )
    if train is None:
        raise misfit(
            "representation.kind: tokens is learned by stages.train, which is not there",
            "stages",
            hint="write `train: {rate: 0.02, steps: 500}` under `stages:`",
        )
    if plan.distillation is not None:
        raise misfit(
            "distillation: of released moments, and kind: tokens has none",
            "distillation",
            hint="remove `distillation`",
        )
    if plan.sampling.method != KIND:
        raise misfit(
            f"sampling.method: {plan.sampling.method}, and representation.kind: tokens is sampled "
            "token by token",
            "sampling.method",
            "sampling",
            "representation.kind",
            hint="write `sampling: {method: tokens}`",
        )
    _require_token_steps(train, single=plan.budget.column is None)
    _require_read(plan)


def _require_token_steps(train: "Train", *, single: bool) -> None:
    """A step on tokens: no times, one image of a unit that is `single`."""
    if train.allocation is not None:
        raise misfit(
            "stages.train.allocation: of time buckets, and training on tokens has no times",
            "stages.train.allocation",
            hint="remove `allocation`",
        )
    if train.buckets != 1:
        raise misfit(
            f"stages.train.buckets is {train.buckets}, and training on tokens has no times",
            "stages.train.buckets",
            hint="leave `buckets` out",
        )
    if train.times != "uniform":
        raise misfit(
            f"stages.train.times: {train.times}, and training on tokens has no times",
            "stages.train.times",
            hint="leave `times` out",
        )
    if single and train.multiplicity != 1:
        raise misfit(
            f"stages.train.multiplicity is {train.multiplicity}: on tokens it counts the images "
            "of a unit that a step sees, and a unit is one record here",
            "stages.train.multiplicity",
            hint="leave `multiplicity` out",
        )
    if train.parameters == "last":
        raise misfit(
            "stages.train.parameters: last is for flows",
            "stages.train.parameters",
            hint="write `parameters: lora`, `attention` or `all`",
        )


def _require_read(plan: "Plan") -> None:
    """Refuse keys that nothing would read."""
    for name, keys in _UNREAD.items():
        for key in _changed(getattr(plan, name), keys):
            raise misfit(
                f"{name}.{key} says nothing of tokens",
                f"{name}.{key}",
                hint=f"leave `{key}` out",
            )
    if plan.velocity != type(plan.velocity)():
        raise misfit(
            "velocity: of flows, and kind: tokens has a transformer of its own",
            "velocity",
            hint="write its size under `tokens:`, such as `transformer: {width: 96, depth: 3}`",
        )


def _require_flow(train: "Train", velocity: str) -> None:
    if train.parameters == "lora":
        raise misfit(
            "stages.train.parameters: lora is for `representation: {kind: tokens}` and for a "
            "frozen prior",
            "stages.train.parameters",
            hint="write `parameters: attention`, with velocity.kind: mmdit, or leave it out",
        )
    if train.parameters == "attention" and velocity == "mlp":
        raise misfit(
            "stages.train.parameters: attention, and velocity.kind: mlp has none",
            "stages.train.parameters",
            hint="write `velocity: {kind: mmdit}` or `{kind: transformer}`, or leave it out",
        )


def _require_completed(plan: "Plan", tokens: Tokens) -> None:
    """Samples of another kind of plan are coarse ones, whose detail comes afterwards."""
    if not tokens.levels:
        raise misfit(
            "tokens.levels: 0 leaves nothing to complete: it is for representation.kind: tokens",
            "tokens.levels",
            "tokens",
            hint="write `levels: 1` or more, or `representation: {kind: tokens}`",
        )
    if plan.sampling.augment is not None:
        raise misfit(
            "sampling.augment moves finished images, and those of a plan with tokens are completed "
            "after they are drawn",
            "sampling.augment",
            hint="leave `augment` out",
        )


def _changed(section: Section, keys: tuple[str, ...]) -> Iterator[str]:
    """Those of the keys that hold another value than their default: locks spell defaults out."""
    fields = type(section).model_fields
    yield from (key for key in keys if getattr(section, key) != fields[key].default)
