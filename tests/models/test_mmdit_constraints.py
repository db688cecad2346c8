"""Section 3.3 on random weights: the clamp's bound, the architectural zero, F + G, the cap."""

import copy

import pytest
import torch
from dualkit import CLASSES, TEXT, inputs, model, settings
from torch import nn

from dpsynth.errors import UsageError
from dpsynth.models.joint_attention import Coupling, DualBlock
from dpsynth.models.seeding import seeded_initialisation
from dpsynth.models.spectral import cap, cap_of, cap_spectral, matrices, operator_norm
from dpsynth.models.velocity import build_velocity, describe
from dpsynth.planning.velocity import Velocity

DEPTH, BOUND = 3, 2.0
CAPPED = 0.7


def borders(net, *at):
    """Image and caption tokens (each (B, K * T, width)) as every block gets them, and the end."""
    seen, handles = [], []
    for block in net.blocks:
        handles.append(block.register_forward_pre_hook(lambda _, given: seen.append(given[:2])))
    handles.append(net.norm.register_forward_pre_hook(lambda _, given: seen.append((given[0],))))
    out = net(*at)
    for handle in handles:
        handle.remove()
    return out, seen


@pytest.mark.parametrize("constraint", ["clamp", "all", "all-2"])
@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
def test_no_token_of_either_stream_passes_the_bound_between_blocks(constraint, scale):
    x, t, y = inputs()
    net = model(constraint, scale=scale)
    norms = [s.detach().norm(dim=-1) for border in borders(net, x * scale, t, y)[1] for s in border]
    assert len(norms) == 2 * DEPTH + 1
    assert all(float(n.max()) <= BOUND * (1 + 1e-12) for n in norms)
    if scale > 1:  # control: the clamp is at work, and without it tokens are longer
        net.clamp = None
        free = [
            s.detach().norm(dim=-1) for border in borders(net, x * scale, t, y)[1] for s in border
        ]
        assert all(float(n.max()) > BOUND for n in free)


def test_a_bound_that_nothing_reaches_changes_nothing():
    x, t, y = inputs()
    wide = model(clamp=1e9)
    assert torch.equal(wide(x, t, y), model()(x, t, y))


@pytest.mark.parametrize("late", [1, 2, 3])
@pytest.mark.parametrize("decoupled", [False, True])
def test_captions_are_an_exact_zero_outside_the_last_blocks(late, decoupled):
    x, t, y = inputs()
    net = model(late=late, decoupled=decoupled, clamp=BOUND)
    out, first = borders(net, x, t, y)
    with torch.no_grad():  # everything on the caption's side moves
        for name, weight in net.named_parameters():
            if ".text." in name or name.startswith(("read", "place")):
                weight.add_(torch.randn_like(weight))
    other, second = borders(net, x, t, (y + 1) % (CLASSES + 1))
    for number in range(DEPTH + 1):
        same = torch.equal(first[number][0], second[number][0])
        assert same == (number <= DEPTH - late), number
    assert not torch.allclose(out, other)


@pytest.mark.parametrize("late", [1, 2])
def test_no_gradient_passes_between_the_streams_outside_the_last_blocks(late):
    x, t, y = inputs()
    net = model(late=late, decoupled=True)
    theirs = [p for n, p in net.named_parameters() if ".text." in n or n.startswith("read")]
    image = borders(net, x, t, y)[1]
    before = image[DEPTH - late][0].square().sum()
    found = torch.autograd.grad(before, theirs, allow_unused=True, retain_graph=True)
    assert all(g is None for g in found)
    x.requires_grad_()
    text = borders(net, x, t, y)[1][DEPTH - late][1].square().sum()
    assert torch.autograd.grad(text, x, allow_unused=True) == (None,)
    after = image[DEPTH - late + 1][0].square().sum()
    assert any(g is not None and bool(g.any()) for g in torch.autograd.grad(
        after, theirs, allow_unused=True
    ))  # fmt: skip


def tokens(width=8, draws=3, batch=4, scale=1.0):
    source = torch.Generator().manual_seed(3)

    def drawn(*shape):
        return torch.randn(*shape, generator=source, dtype=torch.float64) * scale

    seen = torch.rand(batch * draws, 1, 1, 4, generator=source) < 0.6
    seen[..., 0] = True
    return (
        drawn(batch, draws * 5, width),
        drawn(batch, draws * 4, width),
        drawn(batch, draws, width),
        seen,
    )


def block(*, cross=True, decoupled=True, last=False, bound=None, scale=1.0):
    with seeded_initialisation(0):
        made = DualBlock(8, 2, Coupling(cross, decoupled, last, bound)).double()
    for parameter in made.parameters():
        parameter.data.mul_(scale)
    return made


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("bound", [None, 0.05])
def test_a_decoupled_update_is_f_of_the_image_plus_g(last, bound):
    made, (image, text, time, seen) = block(last=last, bound=bound), tokens()
    own, inflow = made.update_parts(image, text, time, seen)
    assert torch.equal(own + inflow, made(image, text, time, seen)[0])
    assert float(inflow.detach().abs().max()) > 1e-3
    # F knows no caption, G is nothing without one.
    alone, nothing = made.update_parts(image, None, time)
    assert torch.equal(alone, own)
    assert not bool(nothing.any())
    other, _ = made.update_parts(image, text.flip(0), time, seen)
    assert torch.equal(other, own)
    # An inflow map of zeros is a removed caption.
    made.image.inflow.weight.data.zero_()
    assert torch.equal(made(image, text, time, seen)[0], own)


@pytest.mark.parametrize("scale", [1.0, 50.0])
def test_an_inflow_is_within_the_bound(scale):
    made, given = block(bound=BOUND, scale=scale), tokens(scale=scale)
    norms = made.update_parts(*given)[1].detach().norm(dim=-1)
    assert float(norms.max()) <= BOUND * (1 + 1e-12)
    if scale > 1:
        made.coupling = Coupling(cross=True, decoupled=True, last=False, bound=None)
        assert float(made.update_parts(*given)[1].detach().norm(dim=-1).max()) > BOUND


def by_hand(asks, gives, seen):
    """Softmax attention (heads, T, width / heads) of one draw, key by key."""
    rows = []
    for head in range(asks.shape[0]):
        for query in asks[head]:
            scores = torch.stack([query @ key / query.numel() ** 0.5 for key, _ in gives[head]])
            scores = scores.masked_fill(~seen, -torch.inf)
            weights = scores.exp() / scores.exp().sum()
            rows.append(sum(w * value for w, (_, value) in zip(weights, gives[head], strict=True)))
    return torch.stack(rows).view(asks.shape)


@pytest.mark.parametrize("decoupled", [False, True])
def test_attention_has_the_softmax_normalisers_that_it_should(decoupled):
    """One over both streams, or one for each, against sums written out."""
    made, (image, text, time, seen) = block(decoupled=decoupled), tokens(draws=1, batch=1)
    ours, theirs = made.image.asked(image, time), made.text.asked(text, time)
    pairs = [
        [list(zip(s.key[0][h], s.value[0][h], strict=True)) for h in range(2)]
        for s in (ours, theirs)
    ]
    every, words = torch.ones(5, dtype=torch.bool), seen[0, 0, 0]
    if decoupled:
        own = by_hand(ours.query[0], pairs[0], every)[None]
        inflow = by_hand(ours.query[0], pairs[1], words)[None]
        expected = made.image.moved(image, own, ours.late)
        expected = expected + made.image.taken(ours, inflow, None)
    else:
        both = [pairs[0][h] + pairs[1][h] for h in range(2)]
        mixed = by_hand(ours.query[0], both, torch.cat([every, words]))[None]
        expected = made.image.moved(image, mixed, ours.late)
    found = made(image, text, time, seen)[0]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_blocks_without_a_meeting_have_no_inflow_and_one_softmax_has_no_parts():
    image, text, time, seen = tokens()
    apart = block(cross=False)
    own, inflow = apart.update_parts(image, text, time, seen)
    assert torch.equal(own, apart(image, text, time, seen)[0])
    assert not bool(inflow.any())
    assert not any("inflow" in name for name, _ in apart.named_parameters())
    with pytest.raises(UsageError, match="one softmax"):
        block(decoupled=False).update_parts(image, text, time, seen)


@pytest.mark.parametrize("constraint", ["decoupled", "all", "all-2"])
def test_a_model_without_its_inflow_maps_knows_no_label(constraint):
    """What is left is caption-independent throughout: the F of every block."""
    net = model(constraint)
    for made in net.blocks:
        if made.coupling.cross:
            made.image.inflow.weight.data.zero_()
    x, t, y = inputs()
    assert torch.equal(net(x, t, y), net(x, t, (y + 1) % (CLASSES + 1)))


@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (3, 7), (64, 64), (40, 192)])
@pytest.mark.parametrize("bound", [0.5, 1.0, 100.0])
def test_a_cap_holds_by_torchs_singular_values(shape, bound):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    exact = torch.linalg.svdvals(weight.double())[0]
    torch.testing.assert_close(operator_norm(weight), exact, rtol=1e-10, atol=0)
    found = weight.clone()
    cap([found], bound)
    if exact <= bound:
        assert torch.equal(found, weight)
        return
    torch.testing.assert_close(found, weight * float(bound / exact), rtol=1e-5, atol=0)
    assert bound * (1 - 1e-5) < torch.linalg.svdvals(found.double())[0] <= bound
    again = found.clone()
    cap([again], bound)
    assert torch.equal(again, found)


def test_a_cap_is_on_all_linear_layers_and_on_nothing_else():
    net = model("spectral", scale=5.0)
    before = copy.deepcopy(net.state_dict())
    assert cap_of(net) == CAPPED
    assert cap_of(build_velocity(Velocity(), 3, 2)) is None
    cap_spectral(net, cap_of(net))
    layers = {n for n, layer in net.named_modules() if isinstance(layer, nn.Linear)}
    assert matrices(net) == {f"{name}.weight" for name in layers}
    for name, value in net.state_dict().items():
        if name in matrices(net):
            assert torch.linalg.svdvals(value)[0] <= CAPPED
        else:
            assert torch.equal(value, before[name])
    cap_spectral(net, None)


def test_the_papers_size_is_the_papers():
    """Table 9: width 192, depth 6, 6 heads, patch 4 of 28 x 28; width 64, length 8, 256 rows."""
    from dpsynth.planning.schema import ImageShape

    keys = Velocity(kind="mmdit", width=192, depth=6, patch=4, clamp=16, late=1, decoupled=True)
    net = build_velocity(keys, 784, 10, image=ImageShape(height=28, width=28))
    assert net.patches.tokens == 49
    assert net.blocks[0].image.heads == 6
    assert net.table.shape == (256, 64)
    assert net.place.weight.shape == (1 + 8, 192)
    assert [made.coupling.cross for made in net.blocks] == [False] * 5 + [True]
    describe(net, ["a"])
    assert net.ids.shape == (2, 9)
    assert settings().text == TEXT
