"""Whether the parts of a plan fit a frozen prior, and what such a prior leaves no room for."""

from typing import TYPE_CHECKING

from dpsynth.planning.allocation import LATEST_HORIZON
from dpsynth.planning.captions import FreeCaptions
from dpsynth.planning.frozen import KIND, FrozenPrior, Latent
from dpsynth.planning.release import Moments
from dpsynth.planning.section import misfit
from dpsynth.planning.source_kinds import PriorSource
from dpsynth.planning.training import Train

if TYPE_CHECKING:
    from dpsynth.planning.schema import Plan

SPACE = "latent"
"""Kind of the representation that a frozen prior has, and no other."""
MOST_CODE = 4096
"""Numbers of a code whose covariance, of their square, is kept whole."""
_WHOLE_METHODS = {
    "embedding": "a generator is fitted to a mean embedding of pixels",
    "central": "training of all weights starts from central images",
}
"""Stages that would not use a frozen prior, and why."""


def require_frozen(plan: "Plan") -> None:
    """Raise a ValueError that names the keys which do not fit a frozen prior, or need one."""
    frozen = plan.frozen
    if frozen is None:
        _require_none(plan)
        return
    if plan.representation.kind != SPACE:
        raise misfit(
            f"prior.kind: {KIND} has codes of its own, and representation.kind is "
            f"{plan.representation.kind}",
            "representation.kind",
            "representation",
            hint="write `representation: {kind: latent}`",
        )
    _require_unused(plan)
    _require_shapes(plan, frozen.latent)
    if plan.stages.moments is not None:
        _require_moments(plan.stages.moments, frozen.latent.dim)
        _require_samples(plan, plan.stages.moments)
    if plan.stages.train is not None:
        _require_train(plan.stages.train)
    _require_distillation(plan)
    _require_sampling(plan, frozen)


def _require_none(plan: "Plan") -> None:
    if plan.representation.kind == SPACE:
        raise misfit(
            "representation.kind: latent is a frozen prior's, and the plan has none",
            "representation.kind",
            hint="write `prior: {kind: diffusers, model: ..., latent: {...}}`, or another kind",
        )
    if any(source.kind == "prior" for source in plan.public):
        raise misfit(
            "a public source of kind prior is drawn by a frozen prior, and the plan has none",
            "public",
            hint="write `prior: {kind: diffusers, model: ..., latent: {...}}`, or other images",
        )


def _require_unused(plan: "Plan") -> None:
    """Sections that would say nothing about a model whose weights and shape are given."""
    if plan.velocity != type(plan.velocity)():
        raise misfit(
            f"velocity: the model is that of prior.kind: {KIND}",
            "velocity",
            hint="leave `velocity` out",
        )
    if plan.tokens is not None:
        raise misfit(
            "tokens: a frozen prior draws whole images, and there is nothing to complete",
            "tokens",
            hint="leave `tokens` out",
        )
    for stage, why in _WHOLE_METHODS.items():
        if getattr(plan.stages, stage) is not None:
            raise misfit(
                f"stages.{stage}: {why}, and the prior is frozen",
                f"stages.{stage}",
                "method",
                hint="write `method: straightdp`, or another prior",
            )
    if isinstance(plan.private.captions, FreeCaptions):
        raise misfit(
            "captions of kind free would be read by the text encoders of a frozen prior, and those "
            "read public prompts alone",
            "private.captions",
            hint="write `captions: {kind: template, template: ...}`, or leave `captions` out",
        )
    if sum(source.kind == "prior" for source in plan.public) > 1:
        raise misfit(
            "public has two sources of kind prior: one has as many images as its count says",
            "public",
            hint="keep one, with the sum of their counts",
        )


def _require_shapes(plan: "Plan", latent: Latent) -> None:
    image = plan.private.image
    if image.channels != 3:
        raise misfit(
            f"private.image.channels is {image.channels}, and such a model draws in colour",
            "private.image.channels",
            "private.image",
            hint="write `channels: 3`: grey images are read as colour ones",
        )
    tall, over = divmod(image.height, latent.height)
    wide, beside = divmod(image.width, latent.width)
    if over or beside or tall != wide:
        raise misfit(
            f"prior.latent is {latent.height} x {latent.width}, and images are {image.height} x "
            f"{image.width}: no VAE makes one of the other by one whole factor",
            "prior.latent",
            hint="for Stable Diffusion 3 and Flux the sides are an eighth of the image's",
        )


def _require_moments(moments: Moments, code: int) -> None:
    if moments.cells is not None:
        raise misfit(
            "stages.moments.cells: covariances by cells, and a frozen prior is steered by means",
            "stages.moments.cells",
            hint="leave `cells` out",
        )
    public = moments.covariance == "public"
    if moments.projection is None and (not public or code > MOST_CODE):
        raise misfit(
            f"stages.moments.covariance: {moments.covariance} has {code} x {code} numbers for "
            "latents, and there is no projection",
            "stages.moments.covariance",
            "stages.moments",
            hint="write `projection: 64` under stages.moments",
        )


def _require_samples(plan: "Plan", moments: Moments) -> None:
    """A basis of p directions is found from more than p images."""
    only, directions = plan.public[0] if len(plan.public) == 1 else None, moments.projection or 0
    if isinstance(only, PriorSource) and only.count <= directions:
        raise misfit(
            f"stages.moments.projection: {directions} directions need more than as many public "
            f"images, and the prior draws {only.count}",
            "public",
            hint=f"write `count: {4 * directions}` under public, or a smaller projection",
        )


def _require_train(train: Train) -> None:
    if train.parameters != "lora":
        raise misfit(
            f"stages.train.parameters: {train.parameters}, and a frozen prior's weights never move",
            "stages.train.parameters",
            "stages.train",
            hint="write `parameters: lora`: factors beside its attention are trained",
        )
    if train.allocation is not None:
        raise misfit(
            "stages.train.allocation shapes clips for a prior that is trained on public codes",
            "stages.train.allocation",
            hint="leave `allocation` out",
        )


def _require_distillation(plan: "Plan") -> None:
    settings = plan.distillation
    if settings is None:
        return
    if plan.stages.train is None:
        raise misfit(
            "distillation teaches the LoRA factors of stages.train, which is not there",
            "distillation",
            hint="add stages.train, or leave `distillation` out: `sampling: {method: guide}`",
        )
    if settings.horizon == "knee" or settings.horizon >= LATEST_HORIZON:
        raise misfit(
            f"distillation.horizon: {settings.horizon} rests on a calibration that a frozen prior "
            "does not have",
            "distillation.horizon",
            "distillation",
            hint="write a number below 0.9, such as `horizon: 0.35`",
        )


def _require_sampling(plan: "Plan", frozen: FrozenPrior) -> None:
    sampling = plan.sampling
    if sampling.sharpen == "public":
        raise misfit(
            f"sampling.sharpen: public repairs soft codecs, and the VAE of a {frozen.family} model "
            "is none",
            "sampling.sharpen",
            hint="leave `sharpen` out",
        )
    if sampling.method == "guide" and sampling.start == "plateau":
        raise misfit(
            "sampling.start: plateau is read off a prior that is trained on public codes",
            "sampling.start",
            "sampling",
            hint="write a number: `start: 0.05` begins at sigma 0.95",
        )
