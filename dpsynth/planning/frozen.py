"""A frozen text-to-image model of diffusers as the prior: where it is, and what its codes are.

Its weights never move. A plan says the shape of its latents, so that it is planned and verified
without the weights, and without diffusers.
"""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, model_validator

from dpsynth.planning.section import PositiveInt, Section, misfit

KIND = "diffusers"
LABEL = "{label}"
PLACEHOLDER = "-"
"""What stands for a folder in facts, which hold no path."""
_HUB_ID = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")
_EXAMPLE = "stabilityai/stable-diffusion-3-medium-diffusers"


def _hub_id_or_folder(value: Any) -> Any:
    """Text as a folder where it begins as a path does, else as a hub id.

    By its spelling alone, never by what lies on this machine: a hub id enters the plan's hash.
    """
    spelt = isinstance(value, str) and (value == PLACEHOLDER or value.startswith((".", "/", "~")))
    return Path(value) if spelt else value


class Latent(Section):
    """Shape of one latent of the model's VAE; a code is all of its numbers, flattened."""

    channels: PositiveInt
    height: PositiveInt
    width: PositiveInt

    @property
    def dim(self) -> int:
        """Numbers of a code.

        >>> Latent(channels=16, height=128, width=128).dim
        262144
        """
        return self.channels * self.height * self.width


class FrozenPrior(Section):
    """A flow-matching pipeline of diffusers whose weights stay as they are.

    model: a hub id, or a folder in diffusers' layout (`./x`, `../x`, `/x`, `~/x`). A folder is
        no fact of the plan; the hash of its weights is one of the calibration's.
    revision: commit of the hub id.
    family: how the transformer is called: Stable Diffusion 3 or Flux.
    prompt: what the text encoders read for a condition; `{label}` is its class name or caption.
    """

    kind: Literal["diffusers"]
    model: Annotated[Path | str, BeforeValidator(_hub_id_or_folder)]
    revision: str | None = None
    family: Literal["sd3", "flux"] = "sd3"
    latent: Latent
    prompt: str = LABEL

    @property
    def hub_id(self) -> str | None:
        """The model's hub id; None where it is a folder."""
        return self.model if isinstance(self.model, str) else None

    def prompt_of(self, label: str) -> str:
        """The prompt of a condition, by its class name or caption.

        >>> prior = FrozenPrior(kind="diffusers", model="a/b", prompt="a photo of a {label}",
        ...     latent=Latent(channels=16, height=2, width=2))
        >>> prior.prompt_of("rose")
        'a photo of a rose'
        """
        return self.prompt.replace(LABEL, label)

    @model_validator(mode="after")
    def _parts_fit(self) -> "FrozenPrior":
        if LABEL not in self.prompt:
            raise misfit(
                f"prompt has no {LABEL}, so that all conditions would be one",
                "prompt",
                hint='write `prompt: "a photo of a {label}"`, or leave it out',
            )
        if self.hub_id is not None and not _HUB_ID.fullmatch(self.hub_id):
            raise misfit(
                f"model: {self.hub_id!r} is neither a hub id, such as {_EXAMPLE}, nor a folder",
                "model",
                hint="write a folder with its path: `model: ./FOLDER`",
            )
        if self.hub_id is None and self.revision is not None:
            raise misfit(
                "revision is a commit of a hub id, and model is a folder",
                "revision",
                hint="leave `revision` out: calibration records the hash of the weights",
            )
        if self.family == "flux" and (self.latent.height % 2 or self.latent.width % 2):
            raise misfit(
                "Flux reads latents in squares of 2 x 2: latent.height and latent.width are even",
                "latent",
            )
        return self
