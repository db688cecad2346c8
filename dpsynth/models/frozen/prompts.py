"""What the text encoders of a pipeline say of the prompts: computed once, and kept as tensors.

Each encoder is the pipeline's own, called by the pipeline's own `encode_prompt`, one prompt at a
time; afterwards all are dropped from memory.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpsynth.errors import MissingError, UsageError
from dpsynth.models.frozen.checkpoint import (
    INSTALL,
    TRANSFORMER,
    Checkpoint,
    loading,
    require_whole,
)
from dpsynth.models.frozen.families import EMBEDS, POOLED, Prompts, diffusers
from dpsynth.models.frozen.machine import machine

_ENCODERS = {
    "sd3": ("StableDiffusion3Pipeline", ("", "_2", "_3"), 256),
    "flux": ("FluxPipeline", ("", "_2"), 512),
}
"""A family's pipeline, its text encoders' suffixes, and the tokens that it gives T5 by default."""


@torch.no_grad()
def encode_prompts(found: Checkpoint, texts: Sequence[str]) -> Prompts:
    """Tensors (n, ...) of n texts, on the CPU; bfloat16 is widened to float32.

    Raises:
        MissingError: transformers is not installed, or an encoder cannot be loaded.
        UsageError: two texts, of which a model could not tell one from the other.
    """
    pipeline, length = _text_pipeline(found)
    device = machine().torch_device
    for name in ("text_encoder", "text_encoder_2", "text_encoder_3"):
        if getattr(pipeline, name, None) is not None:
            getattr(pipeline, name).to(device)
    rows = [_encoded(pipeline, text, length, found.family) for text in texts]
    encoded = {
        name: torch.cat([_kept(row[place]) for row in rows])
        for place, name in enumerate((EMBEDS, POOLED))
    }
    del pipeline
    if device.type == "cuda":
        torch.cuda.empty_cache()
    _require_distinct(texts, encoded)
    return encoded


def _text_pipeline(found: Checkpoint) -> tuple[Any, int]:
    """The family's pipeline with its text encoders alone, and how many tokens T5 is given."""
    try:
        import transformers
    except ImportError:
        raise MissingError("transformers is not installed", hint=INSTALL) from None
    transformers.utils.logging.disable_progress_bar()
    name, suffixes, length = _ENCODERS[found.family]
    library = diffusers()
    parts: dict[str, Any] = {"scheduler": None, "vae": None}
    for suffix in suffixes:
        for part in (f"text_encoder{suffix}", f"tokenizer{suffix}"):
            parts[part] = _part(found.folder, part, transformers)
    if found.family == "sd3":
        # Without T5 the pipeline asks the transformer how wide the zeros in its place are.
        with torch.device("meta"):
            parts["transformer"] = library.SD3Transformer2DModel.from_config(
                found.config(TRANSFORMER)
            )
    else:
        parts["transformer"] = None
    return getattr(library, name)(**parts), length


def _part(folder: Path, part: str, transformers: Any) -> Any:
    """A text encoder or tokenizer, by the class that its folder names; None where T5 is left out.

    Of the encoders only the third one of Stable Diffusion 3 may be missing.
    """
    if not (folder / part).is_dir():
        if part.endswith("_3"):
            return None
        raise MissingError(
            f"the checkpoint {folder} has no {part}/",
            hint="name a folder in the layout of diffusers, with its text encoders",
        )
    # A folder's own code is never run, nor is anybody asked whether to.
    options = {"local_files_only": True, "trust_remote_code": False}
    with loading(part, f"{INSTALL}; or save it again with diffusers: {folder / part}"):
        if part.startswith("tokenizer"):
            return transformers.AutoTokenizer.from_pretrained(str(folder / part), **options)
        config = transformers.AutoConfig.from_pretrained(str(folder / part), **options)
        kind = getattr(transformers, config.architectures[0])
        loaded, info = kind.from_pretrained(
            str(folder / part),
            dtype=machine().torch_dtype,
            use_safetensors=True,
            output_loading_info=True,
            **options,
        )
        require_whole(part, info)
        return loaded.eval()


def _encoded(pipeline: Any, text: str, length: int, family: str) -> tuple[Tensor, Tensor]:
    """Token and pooled embeddings (1, L, D) and (1, P) of one text."""
    asked = {"device": machine().torch_device, "max_sequence_length": length}
    if family == "flux":
        embeds, pooled, _ = pipeline.encode_prompt(text, None, **asked)
    else:
        embeds, _, pooled, _ = pipeline.encode_prompt(
            text, None, None, do_classifier_free_guidance=False, **asked
        )
    return embeds, pooled


def _kept(found: Tensor) -> Tensor:
    wide = found.dtype not in (torch.float16, torch.float32)
    return found.detach().to("cpu", torch.float32 if wide else found.dtype)


def _require_distinct(texts: Sequence[str], encoded: Prompts) -> None:
    """Refuse prompts that read alike, such as two that differ beyond the encoders' last token."""
    seen: dict[bytes, str] = {}
    for place, text in enumerate(texts):
        key = b"".join(part[place].contiguous().numpy().tobytes() for part in encoded.values())
        first = seen.setdefault(key, text)
        if first != text:
            raise UsageError(
                f"the text encoders read the prompts {first!r} and {text!r} alike",
                hint="say what tells them apart in other words, or sooner",
            )
