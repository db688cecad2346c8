"""Arithmetic at its edges: chains of roundings, tiny factors, mixed types, autocast, TF32."""

import math

import pytest
import torch
from enginekit import WIDTH, draw, flat
from torch import nn
from torch.nn import functional

from dpsynth.errors import UsageError
from dpsynth.private.engine import EngineSettings, PerExampleClipper
from dpsynth.private.engine.contributions import Factored
from dpsynth.private.engine.rounding import added
from dpsynth.private.engine.settings import affordable

NUMBERS = 64


class Sums(nn.Module):
    """Kinds of sums over examples of a gradient of 64 equal numbers."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        if kind == "embedding":
            self.layer = nn.Embedding(3, NUMBERS)
        elif kind == "bias":
            self.layer = nn.Linear(1, NUMBERS)
            self.layer.weight.requires_grad_(False)
        elif kind == "convolution":
            self.layer = nn.Conv1d(1, NUMBERS, 1, bias=False)
        elif kind == "scale":
            self.scale = nn.Parameter(torch.ones(NUMBERS))
        else:
            self.layer = nn.Linear(NUMBERS, 1, bias=False)

    def forward(self, x):
        if self.kind == "embedding":
            return self.layer(x[:, 0].long())
        if self.kind == "scale":
            return x.expand(-1, NUMBERS) * self.scale
        if self.kind == "convolution":
            return self.layer(x[:, :, None]).flatten(1)
        return self.layer(x if self.kind == "bias" else x.expand(-1, NUMBERS))


@pytest.mark.parametrize("kind", ["embedding", "bias", "scale", "convolution", "linear"])
@pytest.mark.parametrize("size", [1200, 4096])
def test_one_record_does_not_turn_the_rounding_of_a_whole_batch(kind, size):
    """Large records up to a power of two, then tiny ones that are rounded up only beside them."""
    module, share = Sums(kind), (1 - 2**-10) / math.sqrt(NUMBERS)
    moves = []
    for edge in range(5, 12):
        power = math.ceil(math.log2(share * 2**edge))
        large = math.floor(2.0**power / share) + 1
        if large >= size:
            continue
        tiny = 2.0 ** (power - 23) * 0.5000001
        w = torch.cat([torch.full((large,), 10.0), torch.full((size - large,), tiny)])
        x = torch.ones(size, 1)

        def loss(m, x, w):
            return m(x).sum(1) * w

        with PerExampleClipper(
            module, loss, 1.0, settings=EngineSettings(physical=size)
        ) as clipper:
            clipper._rehearsal.after = lambda *_: None  # not the subject, and slow
            whole = flat(clipper.clipped_sum(x, w).gradients)
            moves.append(float((whole - flat(clipper.clipped_sum(x[1:], w[1:]).gradients)).norm()))
    assert moves
    assert max(moves) <= 1


def test_the_chosen_physical_batch_is_capped():
    assert affordable(1, torch.device("cpu")) == 4096


@pytest.mark.parametrize("clip", [1e-6, 1e-9, 1e-12])
def test_a_factor_too_small_for_float32_is_zero(clip):
    for smallest in (1.41e-45 * 0.51, 1.41e-45 * 1.51, 1e-42):
        if clip / smallest > 3e38:
            continue
        size = math.sqrt(clip / smallest / 8)
        module = nn.Linear(8, 8, bias=False)
        with PerExampleClipper(module, lambda m, x, r=size: m(x).sum((1, 2)) * r, clip) as clipper:
            found = flat(clipper.clipped_sum(torch.full((1, 1, 8), size)).gradients)
        assert float(found.norm()) <= clip


def test_each_ghost_norm_is_bounded_by_its_own_type():
    a, g = (torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(k)) for k in (0, 1))
    narrow, wide = Factored(a, g).squares(), Factored(a.double(), g.double()).squares()
    alone = added([narrow])[1]
    for order in ([narrow, wide], [wide, narrow]):
        short = added(order)[1]
        assert bool((short >= alone).all())
        assert bool((short <= alone * 1.001).all())


def test_autocast_outside_changes_nothing():
    module, x = nn.Linear(64, 64), torch.randn(32, 2, 64)

    def loss(m, x):
        return m(x).square().mean((1, 2))

    with PerExampleClipper(module, loss, 0.05) as clipper:
        plain = clipper.clipped_sum(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = clipper.clipped_sum(x)
    for a, b in ((flat(found.gradients), flat(plain.gradients)), (found.norms, plain.norms)):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_products_are_not_shortened_and_settings_come_back():
    seen = []

    def loss(m, x):
        seen.append((torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32))
        return m(x).square().mean((1, 2))

    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        torch.set_float32_matmul_precision("medium")
        torch.backends.cudnn.allow_tf32 = True
        with PerExampleClipper(nn.Linear(WIDTH, 2), loss, 1.0) as clipper:
            clipper.clipped_sum(draw(3, 1)[:, 0])
        assert torch.get_float32_matmul_precision() == "medium"
        assert torch.backends.cudnn.allow_tf32
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
    assert set(seen) == {("highest", False)}


def test_tensors_of_different_lengths_are_refused():
    def loss(m, x, y):
        return m(x).square().mean((1, 2))

    for other in (torch.zeros(17), torch.zeros(())):
        with (
            PerExampleClipper(nn.Linear(WIDTH, 2), loss, 1.0) as clipper,
            pytest.raises(UsageError, match="differ in length"),
        ):
            clipper.clipped_sum(draw(3, 1)[:, 0], other)


class Calls(nn.Module):
    """Torch's functions by keyword, and the embedding with its table first."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.table = nn.Parameter(torch.randn(4, WIDTH))

    def forward(self, x):
        y = functional.linear(input=x, weight=self.linear.weight, bias=self.linear.bias)
        y = functional.layer_norm(
            input=y, normalized_shape=(WIDTH,), weight=self.norm.weight, bias=self.norm.bias
        )
        ids = (x.sum(-1).abs() * 3).long() % 4
        y = (
            y
            + torch.embedding(self.table, ids)
            + functional.embedding(input=ids, weight=self.table)
        )
        return torch.matmul(input=y, other=self.linear.weight)


class Mixes(nn.Module):
    def __init__(self, frozen):
        super().__init__()
        self.mix = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        for name, parameter in self.mix.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen))

    def forward(self, x):
        return self.mix(x, 2 * x, x, need_weights=False)[0]


@pytest.mark.parametrize(
    "build", [Calls, lambda: Mixes("in_proj"), lambda: Mixes("out_proj")],
    ids=["keywords", "frozen in_proj", "frozen out_proj"],
)  # fmt: skip
def test_ways_to_call_agree_with_autograd(build):
    module, x = build(), draw(3, 1)[:, 0]

    def loss(m, x):
        return m(x).square().mean((1, 2))

    with PerExampleClipper(module, loss, 100.0) as clipper:
        found = clipper.clipped_sum(x).gradients
    loss(module, x).sum().backward()
    for name, parameter in module.named_parameters():
        assert (name in found) == parameter.requires_grad
        if parameter.requires_grad:
            torch.testing.assert_close(found[name].float(), parameter.grad, rtol=1e-3, atol=1e-5)


def test_a_causal_hint_without_a_mask_is_refused():
    class Causal(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

        def forward(self, x):
            return self.mix(x, x, x, need_weights=False, is_causal=True)[0]

    with (
        PerExampleClipper(Causal(), lambda m, x: m(x).mean((1, 2)), 1.0) as clipper,
        pytest.raises(UsageError, match="is_causal"),
    ):
        clipper.clipped_sum(draw(3, 1)[:, 0])


def test_the_old_weight_norm_leaves_nothing_behind():
    module = nn.utils.weight_norm(nn.Linear(WIDTH, 2))
    with PerExampleClipper(module, lambda m, x: m(x).square().mean((1, 2)), 1.0) as clipper:
        clipper.clipped_sum(draw(3, 1)[:, 0])
    assert type(module.weight) is torch.Tensor
