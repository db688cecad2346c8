"""Tiny text-to-image checkpoints on disk, in the layout of diffusers, with random weights."""

import json
from pathlib import Path

import torch

WORDS = ["a", "of", "photo", "cat", "dog", "emu", "red", "blue", "sketch", "zero", "one", "two"]
TEXT_DIM = 16  # of each CLIP encoder; the joint attention sees 2 * TEXT_DIM
TEXT_LENGTH = 16


def tiny_sd3(
    folder,
    image=(16, 16),
    seed=0,
    *,
    channels=4,
    halvings=2,
    layers=1,
    heads=2,
    head_dim=8,
    patch=2,
    qk_norm=None,
    dual=(),
    shift=3.0,
):
    """Write a StableDiffusion3Pipeline folder without T5 and return it as a `Path`.

    Its latents are (channels, height / 2**halvings, width / 2**halvings) of `image`; see
    `latent_of`.
    """
    from diffusers import (
        FlowMatchEulerDiscreteScheduler,
        SD3Transformer2DModel,
        StableDiffusion3Pipeline,
    )

    folder = Path(folder)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        transformer = SD3Transformer2DModel(
            sample_size=max(image) // 2**halvings,
            patch_size=patch,
            in_channels=channels,
            out_channels=channels,
            num_layers=layers,
            attention_head_dim=head_dim,
            num_attention_heads=heads,
            joint_attention_dim=2 * TEXT_DIM,
            caption_projection_dim=heads * head_dim,
            pooled_projection_dim=2 * TEXT_DIM,
            pos_embed_max_size=max(image) // 2**halvings // patch,
            dual_attention_layers=dual,
            qk_norm=qk_norm,
        )
        StableDiffusion3Pipeline(
            transformer=transformer.eval(),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=shift),
            vae=_vae(image, channels, halvings),
            text_encoder=_clip(),
            tokenizer=_words(),
            text_encoder_2=_clip(),
            tokenizer_2=_words(),
            text_encoder_3=None,
            tokenizer_3=None,
        ).save_pretrained(folder)
    return folder


def sd3_pipeline(folder):
    """The checkpoint as diffusers' own pipeline, silent; without T5, as `tiny_sd3` writes it."""
    from diffusers import StableDiffusion3Pipeline

    loaded = StableDiffusion3Pipeline.from_pretrained(
        folder, local_files_only=True, text_encoder_3=None, tokenizer_3=None
    )
    loaded.set_progress_bar_config(disable=True)
    return loaded


def tiny_flux(folder, image=(16, 16), seed=0, *, channels=4, halvings=1, guidance=True):
    """Write a FluxPipeline folder and return it; its T5 has one layer."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
    from transformers import T5Config, T5EncoderModel

    folder = Path(folder)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        transformer = FluxTransformer2DModel(
            patch_size=1,
            in_channels=4 * channels,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=2 * TEXT_DIM,
            pooled_projection_dim=TEXT_DIM,
            axes_dims_rope=(4, 4, 8),
            guidance_embeds=guidance,
        )
        t5 = T5EncoderModel(
            T5Config(
                vocab_size=len(WORDS) + 4,
                d_model=2 * TEXT_DIM,
                d_kv=8,
                d_ff=32,
                num_layers=1,
                num_heads=2,
            )
        )
        FluxPipeline(
            transformer=transformer.eval(),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
            vae=_vae(image, channels, halvings),
            text_encoder=_clip(projected=False),
            tokenizer=_words(),
            text_encoder_2=t5.eval(),
            tokenizer_2=_pieces(),
        ).save_pretrained(folder)
    return folder


def latent_of(folder, image=(16, 16)):
    """The latent shape (C, h, w) of a checkpoint written here."""
    config = json.loads((Path(folder) / "vae" / "config.json").read_text())
    factor = 2 ** (len(config["block_out_channels"]) - 1)
    return config["latent_channels"], image[0] // factor, image[1] // factor


def _vae(image, channels, halvings):
    from diffusers import AutoencoderKL

    widths = tuple(8 for _ in range(halvings + 1))
    return AutoencoderKL(
        sample_size=max(image),
        block_out_channels=widths,
        down_block_types=("DownEncoderBlock2D",) * len(widths),
        up_block_types=("UpDecoderBlock2D",) * len(widths),
        layers_per_block=1,
        latent_channels=channels,
        norm_num_groups=2,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.0609,
        scaling_factor=1.5035,
        mid_block_add_attention=False,
    ).eval()


def _clip(projected=True):
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=len(_merges()[0]),
        hidden_size=TEXT_DIM,
        intermediate_size=32,
        projection_dim=TEXT_DIM,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=TEXT_LENGTH,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    model = (CLIPTextModelWithProjection if projected else CLIPTextModel)(config)
    with torch.no_grad():  # CLIP starts so small that all texts look alike
        for parameter in model.parameters():
            parameter.mul_(10 if parameter.ndim > 1 else 1)
    return model.eval()


def _words():
    """A CLIP tokenizer that knows each of WORDS whole, and all else by its letters."""
    from transformers import CLIPTokenizer

    vocabulary, merges = _merges()
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=TEXT_LENGTH)


def _merges():
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    pieces = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{x}</w>" for x in letters)]
    merges = []
    for word in WORDS:
        parts = [*word[:-1], f"{word[-1]}</w>"]
        while len(parts) > 1:
            merges.append((parts[0], parts[1]))
            parts[:2] = [parts[0] + parts[1]]
            pieces.append(parts[0])
    return {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}, merges


def _pieces():
    from transformers import T5TokenizerFast

    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    pieces = [("▁", -2.0), *((f"▁{word}", -1.0) for word in WORDS)]
    return T5TokenizerFast(vocab=[*special, *pieces], extra_ids=0, model_max_length=TEXT_LENGTH)


def frozen_plan(model, family="sd3", latent=None, image=(16, 16), **changes):
    """A plan over a checkpoint written here: two classes, guided by a global first moment."""
    from dpsynth.planning.schema import Plan

    channels, height, width = latent or latent_of(model, image)
    settings = {
        "name": "frozen",
        "budget": {"epsilon": 3.0, "delta": 1e-5},
        "private": {
            "source": {"kind": "npz", "path": "/nonexistent/private.npz"},
            "capacity": 100,
            "image": {"height": image[0], "width": image[1], "channels": 3},
            "classes": ["cat", "dog"],
            "held_out": {"by": "hash", "fraction": 0.2},
        },
        "public": [{"kind": "prior", "count": 12}],
        "representation": {"kind": "latent", "clip_quantile": 0.95},
        "prior": {
            "kind": "diffusers",
            "model": str(model),
            "family": family,
            "latent": {"channels": channels, "height": height, "width": width},
            "prompt": "a photo of {label}",
        },
        "stages": {"moments": {"covariance": "public", "groups": "auto", "projection": 4}},
        "sampling": {"method": "guide", "start": 0.05, "steps": 4, "guidance": 3.0, "count": 6},
    }
    return Plan.model_validate({**settings, **changes})
