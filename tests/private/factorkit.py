"""Small frozen transformers with LoRA factors, and batches for them."""

import torch

from dpsynth.models.frozen.adapters import add_factors, start_factors
from dpsynth.models.frozen.schedule import Schedule
from dpsynth.models.frozen.velocity import FrozenVelocity
from dpsynth.models.trainable import train_only
from dpsynth.planning.optimizer import LowRank

SHAPE, CLASSES, TEXT = (4, 8, 8), 3, 16
DIM = 4 * 8 * 8
KINDS = {
    "plain": {},
    "qk-norm": {"qk_norm": "rms_norm"},
    "dual": {"qk_norm": "rms_norm", "dual_attention_layers": (0,)},
}


def sd3(**settings):
    import diffusers

    return diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_layers=2,
        attention_head_dim=8, num_attention_heads=2, joint_attention_dim=TEXT,
        caption_projection_dim=16, pooled_projection_dim=TEXT, pos_embed_max_size=4, **settings,
    )  # fmt: skip


def flux():
    import diffusers

    return diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=TEXT, pooled_projection_dim=TEXT,
        axes_dims_rope=(4, 4, 8), guidance_embeds=True,
    )  # fmt: skip


def frozen(kind="plain", *, padding=0, moved=0.3):
    """A frozen model with factors that training has moved; `padding` zero rows end the prompts."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        transformer = flux() if kind == "flux" else sd3(**KINDS[kind])
        transformer.requires_grad_(requires_grad=False)
        add_factors(transformer, LowRank(rank=3, scale=6.0), seed=1)
        embeds = torch.randn(CLASSES + 1, 5 + padding, TEXT)
        embeds[:, 5:] = 0
        prompts = {"prompt.embeds": embeds, "prompt.pooled": torch.randn(CLASSES + 1, TEXT)}
        family = "flux" if kind == "flux" else "sd3"
        model = FrozenVelocity(
            transformer, family, SHAPE, prompts, torch.randn(DIM), schedule=Schedule()
        ).eval()
        for factor in start_factors(model).values():
            factor.add_(moved * torch.randn(factor.shape))
    train_only(model, "lora")
    return model


def batch(examples, draws, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return (
        torch.randn((examples, DIM), generator=draw),
        torch.randint(CLASSES + 1, (examples,), generator=draw),
        torch.rand((examples, draws), generator=draw),
        torch.randn((examples, draws, DIM), generator=draw),
    )


def flat(found):
    return torch.cat([g.flatten() for g in found.gradients.values()])
