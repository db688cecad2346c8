"""The private engine on the coarse part: clipped sums against torch.func, one record's reach."""

import math

import pytest
import torch
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from dpsynth.models import text as captions
from dpsynth.models.seeding import generator, seeded_initialisation
from dpsynth.models.wavelet.adapt import LowRank, merge, train_coarse
from dpsynth.models.wavelet.autoregressive import Autoregressive, coarse_losses
from dpsynth.models.wavelet.causal import Sizes
from dpsynth.planning.velocity import TextStream
from dpsynth.private.engine import GRID, MARGIN, EngineSettings, PerExampleClipper

TOKENS, CODES, COARSE = 12, 6, 5
STREAM = TextStream(width=6, length=3, vocabulary=32)
WORDS = ["a red fish", "dog", "", "one two three four", "red dog"]
ORDERS = {
    "coarse": {"coarse": COARSE},
    "coarse of two codebooks": {"coarse": COARSE, "approximation": 2},
    "raster order": {},
}
UPDATES = ["full", "attention", "lora"]


def build(update="full", dtype=torch.float64, **options):
    sizes = Sizes(TOKENS, CODES, width=8, depth=2, heads=2, text=STREAM, **options)
    with seeded_initialisation(0):
        model = Autoregressive(sizes).to(dtype)
        train_coarse(model, update, rank=2, seed=1)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.3 * torch.randn_like(p))
    return model.eval()


def draw(count=5, images=None, seed=0):
    shape = (count,) if images is None else (count, images)
    source = generator(seed)
    ids = torch.randint(CODES, (*shape, TOKENS), generator=source)
    table = captions.tokens(WORDS, STREAM.length, STREAM.vocabulary)
    return ids, table[torch.randint(len(WORDS), shape, generator=source)]


def flat(gradients):
    return torch.cat([g.reshape(-1) for g in gradients.values()])


def by_func(model, ids, text):
    """Per-example gradients (B, P) by `torch.func`, of a cross entropy written out here."""
    named = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    coarse = model.coarse.stop

    def loss(weights, tokens, words):
        tokens, words = tokens.reshape(-1, TOKENS), words.reshape(-1, STREAM.length)
        logits = functional_call(model, weights, (tokens, words))[:, :coarse]
        log_p = logits - logits.exp().sum(-1, keepdim=True).log()
        return -log_p.gather(2, tokens[:, :coarse, None]).mean()

    with sdpa_kernel(SDPBackend.MATH):
        found = vmap(grad(loss), (None, 0, 0))(named, ids, text)
    return torch.cat([found[n].reshape(len(ids), -1) for n in named], dim=1)


WAYS = [
    # clip, images of a unit, settings: the small clip clips every record, the large one none
    (0.05, 3, EngineSettings()),
    (0.05, None, EngineSettings(physical=2)),
    (16.0, None, EngineSettings(exact_sums=True)),
    (16.0, None, EngineSettings()),
]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("update", UPDATES)
def test_clipped_sums_are_those_of_torch_func(order, update):
    model = build(update, **ORDERS[order])
    expected = {images: by_func(model, *draw(images=images)) for images in (None, 3)}
    for clip, images, speed in WAYS:
        samples, bound = expected[images], clip * (1 - MARGIN)
        norms = samples.norm(dim=1)
        assert 0.06 < float(norms.min()) <= float(norms.max()) < 15
        total = (samples * (bound / norms.clamp(min=bound))[:, None]).sum(0)
        with PerExampleClipper(model, coarse_losses, clip, settings=speed) as clipper:
            found = clipper.clipped_sum(*draw(images=images))
        torch.testing.assert_close(found.norms, norms, rtol=1e-9, atol=0)
        # Beside the 1e-9 there is the declared rounding of each entry to a grid.
        off = float((flat(found.gradients) - total).norm())
        assert off <= 1e-9 * float(total.norm()) + clip * GRID * math.sqrt(len(total)) / 2


@pytest.mark.parametrize("order", ["coarse", "raster order"])
@pytest.mark.parametrize("update", UPDATES)
def test_one_record_moves_the_sum_by_at_most_the_clip(order, update):
    model, (ids, text) = build(update, torch.float32, **ORDERS[order]), draw(4, images=2)
    clip = 0.05
    with PerExampleClipper(model, coarse_losses, clip) as clipper:
        whole = flat(clipper.clipped_sum(ids, text).gradients)
        for out in range(4):
            kept = [i for i in range(4) if i != out]
            rest = flat(clipper.clipped_sum(ids[kept], text[kept]).gradients)
            assert 0.9 * clip < float((whole - rest).norm()) <= clip
        alone = clipper.clipped_sum(ids[:1], text[:1])
        assert float(flat(alone.gradients).norm()) <= clip
        assert not flat(clipper.clipped_sum(ids[:0], text[:0]).gradients).any()


@pytest.mark.parametrize("update", UPDATES)
def test_private_training_moves_the_coarse_part_alone(update):
    model = build(update, coarse=COARSE)
    with PerExampleClipper(model, coarse_losses, 1.0) as clipper:
        names = set(clipper.clipped_sum(*draw()).gradients)
        ids, text = draw()
        full = flat(clipper.clipped_sum(ids, text).gradients)
        short = flat(clipper.clipped_sum(ids[:, :COARSE], text).gradients)
    assert torch.equal(full, short)  # fine tokens need not exist
    assert names
    assert all(name.startswith("coarse.") for name in names)
    assert all(("lora_" in name) == (update == "lora") for name in names)
    if update == "attention":
        assert not any(kind in name for name in names for kind in ("up", "down", "heads", "enter"))
        assert "coarse.read.weight" in names


def test_lora_starts_as_the_public_model_and_merges_into_a_plain_one():
    sizes = Sizes(TOKENS, CODES, COARSE, width=8, depth=2, text=STREAM)
    with seeded_initialisation(3):
        plain = Autoregressive(sizes).double()
        for p in plain.parameters():
            torch.nn.init.normal_(p, std=0.4)
    ids, text = draw()
    before, state = plain(ids, text), {k: v.clone() for k, v in plain.state_dict().items()}
    model = train_coarse(plain, "lora", rank=3, scale=6.0, seed=0)
    assert torch.equal(model(ids, text), before)
    assert sum(isinstance(x, LowRank) for x in model.modules()) == 10
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.requires_grad:
                assert "lora_" in name
                p.normal_(std=0.3)
    layer = model.coarse.layers[0].mix_in
    expected = layer.base.weight + 2.0 * layer.lora_B.weight @ layer.lora_A.weight
    adapted = model(ids, text)
    merged = merge(model)
    torch.testing.assert_close(merged(ids, text), adapted)
    torch.testing.assert_close(merged.coarse.layers[0].mix_in.weight, expected)
    assert {k: v.shape for k, v in merged.state_dict().items()} == {
        k: v.shape for k, v in state.items()
    }
    fine = {k: v for k, v in merged.state_dict().items() if k.startswith("fine.")}
    assert all(torch.equal(v, state[k]) for k, v in fine.items())
    assert not any(p.requires_grad for p in merged.parameters())


def test_a_public_start_with_heads_at_zero_is_taken():
    """Zero heads and a zero LoRA factor: rehearsals in vain, and the sum is still clipped."""
    sizes = Sizes(TOKENS, CODES, COARSE, width=8, depth=1, text=STREAM)
    for update in UPDATES:
        model = train_coarse(Autoregressive(sizes), update, seed=0)
        with PerExampleClipper(model, coarse_losses, 1e-3) as clipper:
            for _ in range(3):
                found = clipper.clipped_sum(*draw())
        assert float(flat(found.gradients).norm()) <= 5e-3
