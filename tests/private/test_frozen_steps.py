"""Steps of DP-SGD on LoRA factors: the logical batch, and units of several images."""

import pytest
import torch
from factorkit import CLASSES, DIM, flat, frozen

from dpsynth.accounting.statistics import ClippedGradientSum
from dpsynth.artifacts.lock import Slot
from dpsynth.models.seeding import generator
from dpsynth.planning.optimizer import LowRank
from dpsynth.planning.training import Train
from dpsynth.private.engine import EngineSettings, PerExampleClipper
from dpsynth.private.noise import NoiseSource
from dpsynth.private.steps import PrivateCodes, Workload, flow_losses, run_chunk
from dpsynth.private.training_state import TrainingState

pytest.importorskip("diffusers")
pytest.importorskip("peft")
SETTINGS = Train(
    rate=0.4,
    steps=2,
    buckets=1,
    multiplicity=2,
    learning_rate=0.1,
    ema=0.0,
    parameters="lora",
    lora=LowRank(rank=3, scale=6.0),
    times="logit-normal",
)
WORK = Workload(SETTINGS, capacity=20, classes=CLASSES, low=0.0)


def records(units=20, images=1):
    draw = generator(1)
    count = units * images
    labels = torch.randint(CLASSES, (count,), generator=draw)
    sizes = None if images == 1 else torch.full((units,), images)
    return PrivateCodes(torch.randn(count, DIM, generator=draw), labels, sizes)


def stepped(physical, data):
    """The log and the trained factors of two steps whose coins and noise repeat themselves."""
    state = TrainingState(frozen(), SETTINGS, noise=0.01)
    slot = Slot(1, "train", "train-0001", ClippedGradientSum(0.1), 0.01, SETTINGS.rate, 2)
    engine = EngineSettings(physical=physical)
    with PerExampleClipper(state.model, flow_losses, 0.1, settings=engine) as clipper:
        log = run_chunk(
            slot, data, WORK, state, clipper=clipper, noise=NoiseSource.unsafe(7, "steps")
        )
    return log, torch.cat([p.flatten() for p in state.average.values()])


@pytest.mark.parametrize("images", [1, 3])
def test_physical_batches_leave_the_logical_batch_as_it_is(images):
    data = records(images=images)
    (first, factors), (second, others) = stepped(2, data), stepped(None, data)
    assert [line["batch"] for line in first] == [line["batch"] for line in second]
    assert 0 < first[0]["batch"] < 20
    torch.testing.assert_close(factors, others, atol=1e-4, rtol=1e-4)


def test_a_unit_of_several_images_moves_the_sum_by_one_clip():
    """Each draw of a unit has an image and a label of its own; the unit is clipped as one."""
    model, draw = frozen(), generator(4)
    z, xi = (torch.randn(2, 2, DIM, generator=draw) for _ in range(2))
    y, t = torch.tensor([[0, 1], [2, 2]]), torch.rand(2, 2, generator=draw)
    with PerExampleClipper(model, flow_losses, 1e-3) as clipper:
        both = flat(clipper.clipped_sum(z, y, t, xi))
        one = flat(clipper.clipped_sum(z[:1], y[:1], t[:1], xi[:1]))
        named = [p for p in model.parameters() if p.requires_grad]
        loss = flow_losses(model, z[:1], y[:1], t[:1], xi[:1]).sum()
        plain = torch.cat([g.flatten() for g in torch.autograd.grad(loss, named)])
    assert float((both - one).norm()) <= 1e-3
    aligned = torch.nn.functional.cosine_similarity(one, plain.double(), dim=0)
    assert float(aligned) > 1 - 1e-6
