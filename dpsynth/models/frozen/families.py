"""How the transformers of two pipelines of diffusers are called: Stable Diffusion 3, and Flux.

Another flow-matching pipeline is one more class with these members; `prompts` has its text
encoders.
"""

from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from dpsynth.errors import MissingError
from dpsynth.models.frozen.checkpoint import (
    INSTALL,
    TRANSFORMER,
    VAE,
    Checkpoint,
    loading,
    require_weights,
    require_whole,
)
from dpsynth.models.frozen.schedule import Schedule

Prompts = dict[str, Tensor]
"""What the text encoders say of each of B prompts, tensors (B, ...), by name."""
EMBEDS, POOLED = "prompt.embeds", "prompt.pooled"
FLUX_GUIDANCE = 3.5
"""What Flux's guidance embedding is given: the default of its pipeline in diffusers."""


class Family(Protocol):
    """One kind of pipeline. `predict` is xi - z, in the model's own units."""

    name: ClassVar[str]

    def transformer(self, found: Checkpoint, dtype: torch.dtype) -> nn.Module:
        """Its transformer in eval mode, on the CPU, no weight of it trainable."""
        ...

    def schedule(self, found: Checkpoint, height: int, width: int) -> Schedule:
        """The noise levels that its pipeline goes through."""
        ...

    def predict(self, transformer: nn.Module, x: Tensor, sigma: Tensor, prompts: Prompts) -> Tensor:
        """Noise less latent, xi - z (B, C, h, w), at x (B, C, h, w) and levels sigma (B,)."""
        ...


class StableDiffusion3:
    """`StableDiffusion3Pipeline`: Stable Diffusion 3 and 3.5 (Esser et al. 2024)."""

    name: ClassVar[str] = "sd3"

    def transformer(self, found: Checkpoint, dtype: torch.dtype) -> nn.Module:
        """See `Family`."""
        return _frozen(diffusers().SD3Transformer2DModel, found, TRANSFORMER, dtype)

    def schedule(self, found: Checkpoint, height: int, width: int) -> Schedule:
        """See `Family`: the scheduler's own levels."""
        patch = int(found.config(TRANSFORMER)["patch_size"])
        return found.schedule((height // patch) * (width // patch), even=False)

    def predict(self, transformer: nn.Module, x: Tensor, sigma: Tensor, prompts: Prompts) -> Tensor:
        """See `Family`: timesteps are 1000 sigma."""
        out: Tensor = transformer(
            hidden_states=x,
            timestep=1000.0 * sigma,
            encoder_hidden_states=prompts[EMBEDS],
            pooled_projections=prompts[POOLED],
            return_dict=False,
        )[0]
        return out


class Flux:
    """`FluxPipeline`: latents in squares of 2 x 2, and guidance that is embedded in the model.

    Its embedded guidance stays at the pipeline's default; classifier-free guidance over it is that
    of `sampling.guidance`, the pipeline's `true_cfg_scale`.
    """

    name: ClassVar[str] = "flux"

    def transformer(self, found: Checkpoint, dtype: torch.dtype) -> nn.Module:
        """See `Family`."""
        return _frozen(diffusers().FluxTransformer2DModel, found, TRANSFORMER, dtype)

    def schedule(self, found: Checkpoint, height: int, width: int) -> Schedule:
        """See `Family`: even levels, shifted by the number of tokens."""
        return found.schedule((height // 2) * (width // 2), even=True)

    def predict(self, transformer: nn.Module, x: Tensor, sigma: Tensor, prompts: Prompts) -> Tensor:
        """See `Family`."""
        height, width = x.shape[-2:]
        guided = bool(transformer.config.guidance_embeds)  # type: ignore[union-attr]
        out = transformer(
            hidden_states=packed(x),
            timestep=sigma,
            guidance=torch.full_like(sigma, FLUX_GUIDANCE) if guided else None,
            encoder_hidden_states=prompts[EMBEDS],
            pooled_projections=prompts[POOLED],
            txt_ids=x.new_zeros(prompts[EMBEDS].shape[1], 3),
            img_ids=_places(height // 2, width // 2).to(x),
            return_dict=False,
        )[0]
        return unpacked(out, height, width)


FAMILIES: dict[str, Family] = {family.name: family for family in (StableDiffusion3(), Flux())}


def packed(x: Tensor) -> Tensor:
    """Latents (B, C, h, w) as tokens (B, h w / 4, 4 C), one for each square of 2 x 2."""
    batch, channels, height, width = x.shape
    squares = x.view(batch, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return squares.reshape(batch, (height // 2) * (width // 2), 4 * channels)


def unpacked(tokens: Tensor, height: int, width: int) -> Tensor:
    """The way back from `packed`."""
    batch, _, numbers = tokens.shape
    squares = tokens.view(batch, height // 2, width // 2, numbers // 4, 2, 2)
    return squares.permute(0, 3, 1, 4, 2, 5).reshape(batch, numbers // 4, height, width)


def _places(rows: int, columns: int) -> Tensor:
    """Where each token stands, (rows columns, 3), as Flux counts: 0, row, column."""
    places = torch.zeros(rows, columns, 3)
    places[..., 1] += torch.arange(rows)[:, None]
    places[..., 2] += torch.arange(columns)[None, :]
    return places.view(rows * columns, 3)


def load_vae(found: Checkpoint) -> nn.Module:
    """The checkpoint's AutoencoderKL in float32, in eval mode, on the CPU."""
    return _frozen(diffusers().AutoencoderKL, found, VAE, torch.float32)


def diffusers() -> Any:
    """The library, which is loaded here and nowhere before. Raises MissingError without it."""
    try:
        import diffusers as library
    except ImportError:
        raise MissingError("diffusers is not installed", hint=INSTALL) from None
    return library


def _frozen(kind: Any, found: Checkpoint, part: str, dtype: torch.dtype) -> nn.Module:
    wanted = found.weights_sha256
    with loading(part, f"save it again with diffusers: {found.folder / part}"):
        model, info = kind.from_pretrained(
            str(found.folder),
            subfolder=part,
            torch_dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
        require_whole(part, info)
    # The files may have been replaced between the hash and the reading of them.
    require_weights(Checkpoint(found.folder, found.family), wanted)
    loaded: nn.Module = model
    return loaded.eval().requires_grad_(False)
