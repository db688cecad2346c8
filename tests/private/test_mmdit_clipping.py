"""The backbone under DP-SGD: per-example gradients by torch.func, the last layer alone, the cap."""

import copy

import pytest
import torch
from dualkit import CAPTIONS, CLASSES, CONSTRAINTS, TEXT, inputs, model, settings
from torch.func import functional_call, grad, vmap

from dpsynth.accounting.statistics import ClippedGradientSum
from dpsynth.artifacts.lock import Slot
from dpsynth.models.seeding import generator
from dpsynth.models.spectral import cap_spectral, matrices
from dpsynth.models.trainable import train_last
from dpsynth.models.velocity import build_velocity, describe
from dpsynth.planning.training import Prior, Train
from dpsynth.planning.velocity import Velocity
from dpsynth.private.engine import DEFAULT, GRID, MARGIN, EngineSettings, PerExampleClipper
from dpsynth.private.noise import NoiseSource
from dpsynth.private.steps import PrivateCodes, Workload, flow_losses, run_chunk
from dpsynth.private.training_state import TrainingState
from dpsynth.public.prior import fit_prior

CAP = 0.7


def batch(space, draws, size=5, null=CLASSES):
    xi, t, _ = inputs(space, draws, size)
    z = torch.randn(size, xi.shape[-1], generator=generator(2), dtype=torch.float64)
    return z, torch.arange(size) % (null + 1), t, xi


def by_func(net, data):
    """Per-example gradients (B, P) of the trainable weights by torch.func."""
    named = {n: p.detach() for n, p in net.named_parameters() if p.requires_grad}

    def loss(weights, *one):
        def run(*at):
            return functional_call(net, weights, at)

        return flow_losses(run, *(x[None] for x in one)).sum()

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        found = vmap(grad(loss), (None, 0, 0, 0, 0))(named, *data)
    return torch.cat([found[name].reshape(len(data[0]), -1) for name in named], dim=1)


def flat(gradients):
    return torch.cat([g.reshape(-1) for g in gradients.values()])


def check(net, data, speed=DEFAULT):
    """Norms and clipped sums; the clip is the median norm, so that it bites on half."""
    expected = by_func(copy.deepcopy(net), data)
    norms = expected.norm(dim=1)
    clip = float(norms.median())
    bound = clip * (1 - MARGIN)
    total = (expected * (bound / norms.clamp(min=bound))[:, None]).sum(0)
    with PerExampleClipper(net, flow_losses, clip, settings=speed) as clipper:
        found = clipper.clipped_sum(*data)
    torch.testing.assert_close(found.norms, norms, rtol=1e-9, atol=1e-12)
    # Ghost norms are clipped by their upper bound, in units of float32 (D2).
    slack = 1e-3 * clip * len(norms)
    assert float((flat(found.gradients) - total).norm()) <= slack
    with PerExampleClipper(
        net, flow_losses, clip, settings=EngineSettings(exact_sums=True)
    ) as clipper:
        exact = clipper.clipped_sum(*data)
    torch.testing.assert_close(
        flat(exact.gradients), total, rtol=1e-9, atol=2 * clip * GRID * len(norms)
    )


@pytest.mark.parametrize("constraint", CONSTRAINTS)
@pytest.mark.parametrize("draws", [1, 4])
def test_norms_and_clipped_sums_are_those_of_torch_func(constraint, draws):
    check(model(constraint), batch("code", draws))


@pytest.mark.parametrize("constraint", ["plain", "all"])
def test_so_they_are_on_pixels_in_pieces_and_with_captions_of_ones_own(constraint):
    net = model(constraint, "image")
    check(net, batch("image", 2), EngineSettings(physical=2))
    describe(net, ["one", "a long caption of words", *CAPTIONS, "one"])
    check(net, batch("image", 2, size=8, null=6))


def test_a_label_a_draw_has_its_own_caption():
    net, (z, y, t, xi) = model("all-2"), batch("code", 4)
    labels = (y[:, None] + torch.arange(4)) % (CLASSES + 1)
    check(net, (z, labels, t, xi))


def test_one_record_moves_the_sum_by_no_more_than_the_clip():
    net, (z, y, t, xi) = model("all"), batch("code", 4)
    for size in (1.0, 1e3):
        grown = torch.cat([z[:1] * size, z[1:]])
        with PerExampleClipper(net, flow_losses, 0.1) as clipper:
            alone = clipper.clipped_sum(grown[:1], y[:1], t[:1], xi[:1])
            both = clipper.clipped_sum(grown, y, t, xi)
            without = clipper.clipped_sum(grown[1:], y[1:], t[1:], xi[1:])
        assert float(flat(alone.gradients).norm()) <= 0.1
        moved = flat(both.gradients) - flat(without.gradients)
        assert float(moved.norm()) <= 0.1 * (1 + 1e-5)


def trained(net, *, steps=3, **keys):
    """A state after private steps with much noise, and what it was before."""
    train = Train(rate=0.5, steps=steps, multiplicity=2, buckets=1, ema=0.5, **keys)
    before = copy.deepcopy(net.state_dict())
    carried = TrainingState(net, train, noise=0.1)
    source = generator(0)
    data = PrivateCodes(torch.randn(20, net.dim, generator=source), torch.arange(20) % CLASSES)
    work = Workload(train, capacity=20, classes=CLASSES, low=0.0)
    slot = Slot(1, "train", "train-0001", ClippedGradientSum(1.0), 5.0, 0.5, steps)
    with PerExampleClipper(net, flow_losses, 1.0) as clipper:
        run_chunk(slot, data, work, carried, clipper=clipper, noise=NoiseSource())
    return carried, before


@pytest.mark.parametrize("kind", ["mlp", "transformer", "mmdit"])
def test_training_the_last_layer_moves_nothing_else(kind, tmp_path):
    keys = Velocity(kind=kind, width=32, depth=2)
    net = build_velocity(keys, 7, CLASSES)
    train_last(net)
    carried, before = trained(net, learning_rate=0.1)
    moved = {n for n, value in net.state_dict().items() if not torch.equal(value, before[n])}
    last = {"leave.weight", "leave.bias"}
    assert moved == (last if kind == "mlp" else {*last, "norm.weight", "norm.bias"})
    path = tmp_path / "chunk.safetensors"
    carried.save(path)
    again = build_velocity(keys, 7, CLASSES)
    again.load_state_dict(before)
    train_last(again)
    resumed = TrainingState(again, carried._settings, noise=0.1)
    resumed.load(path)
    wanted = carried.averaged().state_dict()
    assert all(torch.equal(v, wanted[n]) for n, v in resumed.averaged().state_dict().items())


def test_the_spectral_cap_holds_after_every_private_step():
    net = model("all", scale=3.0).float()
    cap_spectral(net, CAP)
    carried, _ = trained(net, learning_rate=0.5)
    weights = [dict(net.named_parameters()), carried.average]
    for named in weights:
        found = [float(torch.linalg.svdvals(named[n].detach())[0]) for n in matrices(net)]
        assert max(found) <= CAP
    kept = {n: v.clone() for n, v in carried.average.items()}
    done = dict(carried.averaged().named_parameters())
    assert all(torch.equal(done[n], value) for n, value in kept.items())
    # Control: without the cap these very steps leave the bound.
    net.spectral = None
    free, _ = trained(net, learning_rate=0.5)
    named = dict(free.model.named_parameters())
    assert max(float(torch.linalg.svdvals(named[n].detach())[0]) for n in matrices(net)) > CAP


def test_a_capped_layer_is_not_touched_when_the_last_one_alone_is_trained():
    net = model("all", scale=3.0).float()
    train_last(net)  # and not capped before: what is frozen stays as it is
    carried, before = trained(net, learning_rate=0.5)
    assert torch.equal(net.enter.weight, before["enter.weight"])
    found = float(torch.linalg.svdvals(carried.average["leave.weight"])[0])
    assert found <= CAP


def test_a_prior_is_within_its_constraints_and_learns_public_captions():
    """Two public captions at +3 and -3; afterwards labels mean the plan's captions again."""
    source = generator(0)
    place = torch.arange(400) % 2
    codes = torch.tensor([3.0, -3.0])[place][:, None] + 0.1 * torch.randn(400, 3, generator=source)
    said = [("up here", "down")[k] for k in place.tolist()]
    keys = settings("all", width=16, depth=2, spectral=1.5, clamp=16.0)
    steps = Prior(steps=70, batch=64, ema=0.8, learning_rate=1e-2)
    net = fit_prior(codes, place, keys, steps, 2, seed=0, captions=["a", "b"], captions_of=said)
    assert (
        max(
            float(torch.linalg.svdvals(p.double())[0])
            for n, p in net.named_parameters()
            if n in matrices(net)
        )
        <= 1.5
    )
    x, t = torch.zeros(2, 3), torch.full((2,), 0.2)
    with torch.no_grad():
        describe(net, ["down", "up here"])
        velocity = net(x, t, torch.arange(2))
        describe(net, None)
        fresh = net(x, t, torch.arange(2))
    assert velocity[0].mean() < -1.0
    assert velocity[1].mean() > 1.0
    assert not torch.allclose(fresh, velocity.flip(0))
    assert net.ids.shape == (3, 2)
    assert TEXT.length > 1
