"""The small prior as a folder of diffusers, in the form of Stable Diffusion 3.

Transformer, autoencoder and scheduler are SD3's classes at a small size. The two text encoders are
CLIP's with random weights, as is their tokenizer, which knows the prompt's words whole: what a
prompt says reaches the transformer as a fixed, distinct embedding. There is no third one.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.frozen.sizes import Size
from benchmarks.frozen.things import CLASSES

PROMPT = "a photo of a {label}"
SHIFT = 3.0
"""Of the scheduler, as SD3-medium's at its own resolution."""
TEXT = 32
"""Width of each text encoder."""
LENGTH = 8
"""Tokens of a prompt."""
T5 = 256
"""Zeros that the pipeline puts in the place of T5's tokens where there is no T5."""


def write(folder: Path, transformer: Any, vae: Any) -> Path:
    """Save the whole pipeline; `model_index.json`, which says that it is whole, comes last."""
    from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline

    words = tokenizer()
    StableDiffusion3Pipeline(
        transformer=transformer.eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
        vae=vae.eval(),
        text_encoder=text_encoder(1),
        tokenizer=words,
        text_encoder_2=text_encoder(2),
        tokenizer_2=words,
        text_encoder_3=None,
        tokenizer_3=None,
    ).save_pretrained(folder)
    return folder


def build_transformer(size: Size) -> Any:
    """The untrained transformer, 2x2 latent places a token."""
    from diffusers import SD3Transformer2DModel

    channels, side, _ = size.latent
    return SD3Transformer2DModel(
        sample_size=side,
        patch_size=2,
        in_channels=channels,
        out_channels=channels,
        num_layers=size.layers,
        attention_head_dim=size.head,
        num_attention_heads=size.heads,
        joint_attention_dim=2 * TEXT,
        caption_projection_dim=size.width,
        pooled_projection_dim=2 * TEXT,
        pos_embed_max_size=side // 2,
    )


def text_encoder(seed: int) -> Any:
    """A CLIP text encoder of random weights, large enough that words differ."""
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = CLIPTextConfig(
            vocab_size=len(vocabulary()[0]),
            hidden_size=TEXT,
            intermediate_size=2 * TEXT,
            projection_dim=TEXT,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=LENGTH,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=1,
            initializer_factor=2.0,
        )
        return CLIPTextModelWithProjection(config).eval()


def tokenizer() -> Any:
    """A CLIP tokenizer of the prompt's words."""
    from transformers import CLIPTokenizer

    pieces, merges = vocabulary()
    return CLIPTokenizer(vocab=pieces, merges=merges, model_max_length=LENGTH)


def vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Numbers of the pieces, and the merges that make each word of them one piece.

    >>> pieces, merges = vocabulary()
    >>> "boot</w>" in pieces, ("boo", "t</w>") in merges
    (True, True)
    """
    letters = "abcdefghijklmnopqrstuvwxyz"
    pieces = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{x}</w>" for x in letters)]
    merges = []
    for word in [*PROMPT.split()[:-1], *CLASSES]:
        parts = [*word[:-1], f"{word[-1]}</w>"]
        while len(parts) > 1:
            merges.append((parts[0], parts[1]))
            parts[:2] = [parts[0] + parts[1]]
            pieces.append(parts[0])
    return {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}, merges


@torch.no_grad()
def prompts(folder: Path) -> tuple[Tensor, Tensor]:
    """Embeddings (11, L, D) and pooled ones (11, P) of the classes' prompts, and of the empty one.

    By the pipeline's own code.
    """
    from diffusers import StableDiffusion3Pipeline

    pipeline = StableDiffusion3Pipeline.from_pretrained(
        folder, local_files_only=True, text_encoder_3=None, tokenizer_3=None
    )
    texts = [*(PROMPT.format(label=label) for label in CLASSES), ""]
    embeds, _, pooled, _ = pipeline.encode_prompt(
        texts, texts, texts, do_classifier_free_guidance=False
    )
    return embeds, pooled
