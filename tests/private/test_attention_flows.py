"""`parameters: attention` on flows (DP-LDM's setting): attention and conditioning alone move."""

import pytest
import torch

from dpsynth.accounting.statistics import ClippedGradientSum
from dpsynth.artifacts.lock import Slot
from dpsynth.errors import UsageError
from dpsynth.models.seeding import generator, seeded_initialisation
from dpsynth.models.trainable import train_attention, train_only
from dpsynth.models.velocity import build_velocity
from dpsynth.planning.training import Train
from dpsynth.planning.velocity import Velocity
from dpsynth.private.engine import GRID, PerExampleClipper
from dpsynth.private.noise import NoiseSource
from dpsynth.private.steps import PrivateCodes, Workload, flow_losses, run_chunk
from dpsynth.private.training_state import TrainingState

DIM, CLASSES, CLIP = 16, 3, 0.1
FROZEN = ("enter", "leave", "time_in", "time_out", "position", "up", "down", "norm_up")


def net(kind):
    more = {"late": 1, "decoupled": True} if kind == "mmdit" else {}
    with seeded_initialisation(1):
        model = build_velocity(Velocity(kind=kind, width=8, depth=2, **more), DIM, CLASSES)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.4)
    return model.eval()


def batch(count=5):
    source = generator(0)
    z, xi = torch.randn(count, DIM, generator=source), torch.randn(count, 2, DIM, generator=source)
    y, t = (
        torch.randint(CLASSES, (count,), generator=source),
        torch.rand(count, 2, generator=source),
    )
    return z, y, t, xi


@pytest.mark.parametrize("kind", ["transformer", "mmdit"])
def test_attention_and_conditioning_alone_are_trained(kind):
    model = net(kind)
    train_attention(model)
    moved = {n for n, p in model.named_parameters() if p.requires_grad}
    parts = {part for name in moved for part in name.split(".")}
    assert parts.isdisjoint(FROZEN)
    assert {"mix_in", "mix_out"} <= parts
    assert ("label" in parts) == ("modulate" in parts) == (kind == "transformer")
    assert ("read" in parts) == ("inflow" in parts) == (kind == "mmdit")


@pytest.mark.parametrize("kind", ["transformer", "mmdit"])
def test_its_clipped_sum_is_that_of_autograd_one_record_at_a_time(kind):
    model = net(kind).double()
    train_only(model, "attention")
    z, y, t, xi = (x.double() if x.is_floating_point() else x for x in batch())
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    total = {n: torch.zeros_like(p) for n, p in named}
    for i in range(len(z)):
        x = (1 - t[i])[:, None] * xi[i] + t[i][:, None] * z[i]
        loss = (model(x[None], t[i][None], y[i : i + 1])[0] - (z[i] - xi[i])).square().mean()
        grads = torch.autograd.grad(loss, [p for _, p in named], allow_unused=True)
        norm = sum(float(g.square().sum()) for g in grads if g is not None) ** 0.5
        for (name, _), g in zip(named, grads, strict=True):
            if g is not None:
                total[name] += g * min(1.0, CLIP * (1 - 2**-10) / norm)
    with PerExampleClipper(model, flow_losses, CLIP) as clipper:
        found = clipper.clipped_sum(z, y, t, xi).gradients
    assert found.keys() == total.keys()
    for name, one in total.items():
        torch.testing.assert_close(found[name], one.detach(), rtol=1e-8, atol=2 * CLIP * GRID)


def test_private_steps_move_nothing_else():
    model = net("mmdit")
    train_attention(model)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    settings = Train(rate=0.5, steps=2, buckets=1, multiplicity=2, parameters="attention")
    data = PrivateCodes(batch(20)[0], torch.arange(20) % CLASSES)
    slot = Slot(1, "train", "train-0001", ClippedGradientSum(CLIP), 0.5, 0.5, 2, False)
    state = TrainingState(model, settings, 0.1)
    with PerExampleClipper(model, flow_losses, CLIP) as clipper:
        work = Workload(settings, 20, CLASSES, 0.0)
        run_chunk(slot, data, work, state, clipper=clipper, noise=NoiseSource())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == (not parameter.requires_grad)


def test_what_a_flow_cannot_train_is_refused():
    with pytest.raises(UsageError, match="MlpVelocity has no attention"):
        train_only(net("mlp"), "attention")
    with pytest.raises(UsageError, match="no update 'lora'"):
        train_only(net("transformer"), "lora")
