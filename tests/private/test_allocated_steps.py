"""Steps of training whose clip depends on the time bucket: what one record may move, and noise."""

import math
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dpsynth.accounting.statistics import BucketedGradientSums, ClippedGradientSum
from dpsynth.artifacts.lock import Slot
from dpsynth.errors import PlanError, UsageError
from dpsynth.models.seeding import generator, seeded_initialisation
from dpsynth.models.velocity import build_velocity
from dpsynth.planning.allocation import Allocation, bucket_edges
from dpsynth.planning.training import Train
from dpsynth.planning.velocity import Velocity
from dpsynth.private import flow_task
from dpsynth.private.engine import PerExampleClipper
from dpsynth.private.noise import NoiseSource
from dpsynth.private.steps import PrivateCodes, Workload, flow_losses, run_chunk
from dpsynth.private.training_state import TrainingState

DIM, CLASSES, CLIPS = 5, 2, (1e-3, 0.05, 4e-3)
SETTINGS = Train(
    rate=0.5, steps=12, chunk=6, buckets=3, multiplicity=2, learning_rate=1e-3,
    allocation=Allocation(),
)  # fmt: skip
WORK = Workload(SETTINGS, capacity=40, classes=CLASSES, low=0.3)


def codes(n: int) -> PrivateCodes:
    source = generator(0)
    labels = torch.randint(CLASSES, (n,), generator=source)
    return PrivateCodes(torch.randn(n, DIM, generator=source), labels)


class Watched(TrainingState):
    """Keeps the noisy means that it moved along."""

    def __init__(self) -> None:
        with seeded_initialisation(2):
            net = build_velocity(Velocity(width=8, depth=1), DIM, CLASSES)
        super().__init__(net, SETTINGS, noise=0.1)
        self.means: list[torch.Tensor] = []

    def apply(self, gradients) -> None:
        self.means.append(torch.cat([g.flatten() for g in gradients.values()]))
        super().apply(gradients)


def slot(std: float, steps: int = 6, statistic=None) -> Slot:
    return Slot(1, "train", "train-0001", statistic or BucketedGradientSums(CLIPS), std, 0.5, steps)


def go(data: PrivateCodes, one: Slot, *, clip: float = 1.0) -> tuple[Watched, list]:
    state = Watched()
    with PerExampleClipper(state.model, flow_losses, clip) as clipper:
        log = run_chunk(one, data, WORK, state, clipper=clipper, noise=NoiseSource.unsafe(3))
    return state, log


def test_each_step_is_clipped_by_its_buckets_own_clip() -> None:
    """Gradients are far longer than any clip here, so that a sum of n is nearly n clips long."""
    state, log = go(codes(40), slot(1e-9))
    for step, (mean, line) in enumerate(zip(state.means, log, strict=True)):
        total = float(mean.norm()) * 0.5 * 40
        bound = line["batch"] * CLIPS[step % 3]
        assert 0.05 * bound < total <= bound
        assert line["clipped"] == 1.0


def test_one_record_moves_a_step_by_at_most_its_buckets_clip() -> None:
    """Each step's batch again without its last record: in every bucket, and tight."""
    state, moves = Watched(), []
    with PerExampleClipper(state.model, flow_losses, 1.0) as clipper:
        whole_of = clipper.clipped_sum

        def beside(*batch):
            whole, less = whole_of(*batch), whole_of(*(x[:-1] for x in batch))
            apart = [whole.gradients[n] - less.gradients[n] for n in whole.gradients]
            moves.append(math.sqrt(sum(float(g.square().sum()) for g in apart)))
            return whole

        clipper.clipped_sum = beside
        run_chunk(slot(1.0), codes(40), WORK, state, clipper=clipper, noise=NoiseSource.unsafe(3))
    for step, moved in enumerate(moves):
        clip = CLIPS[step % 3]
        assert 0.99 * clip < moved <= clip


def test_the_noise_is_the_same_in_every_bucket() -> None:
    empty = codes(0)
    state, log = go(empty, slot(7.0, steps=6))
    for mean in state.means:
        count = len(mean)
        energy = float(mean.square().sum()) / (7.0 / (0.5 * 40)) ** 2
        assert abs(energy - count) < 6 * math.sqrt(2 * count)
    assert [line["batch"] for line in log] == [0] * 6


def test_equal_clips_are_steps_of_one_clip_bit_for_bit() -> None:
    data = codes(40)
    uniform, log = go(data, slot(0.2, statistic=BucketedGradientSums((0.5,) * 3)))
    plain, plain_log = go(data, slot(0.2, statistic=ClippedGradientSum(0.5)), clip=0.5)
    assert log == plain_log
    for a, b in zip(uniform.means, plain.means, strict=True):
        assert torch.equal(a, b)


def test_the_clip_of_a_step_is_counted_from_its_slots_start() -> None:
    """So that what is charged for a slot holds wherever training stands."""
    state = Watched()
    with PerExampleClipper(state.model, flow_losses, 1.0) as clipper:
        for _ in range(2):  # the first leaves the count at 4, no multiple of the buckets
            run_chunk(slot(1e-9, 4), codes(40), WORK, state,
                      clipper=clipper, noise=NoiseSource.unsafe(3))  # fmt: skip
    sizes = [float(mean.norm()) for mean in state.means]
    for start in (0, 4):
        assert sizes[start] < sizes[start + 2] < sizes[start + 1]
        assert sizes[start + 3] < sizes[start + 2]


def test_a_clipper_takes_only_clips_that_it_can_keep() -> None:
    layer = nn.Linear(3, 2)
    with PerExampleClipper(layer, lambda m, x: m(x).square().sum(-1), 1.0) as clipper:
        x = torch.randn(4, 3)
        for clip in (1e-3, 0.5, 2.0):
            clipper.set_clip(clip)
            total = clipper.clipped_sum(x[:1]).gradients
            assert sum(float(g.square().sum()) for g in total.values()) ** 0.5 <= clip
        for bad in (0.0, -1.0, math.inf, math.nan, 1e-13):
            with pytest.raises(UsageError, match="expected a number from"):
                clipper.set_clip(bad)


def test_training_refuses_buckets_that_begin_elsewhere() -> None:
    held = SimpleNamespace(allocation={"edges": list(bucket_edges(0.3, 3))})
    flow_task.require_edge(held, 0.3)
    with pytest.raises(PlanError, match=r"buckets begin at 0\.3"):
        flow_task.require_edge(held, 0.4)
    flow_task.require_edge(SimpleNamespace(allocation=None), 0.4)


def test_the_planners_edges_are_the_steps_own() -> None:
    edges = bucket_edges(0.3, 3)
    assert [WORK.bucket(step) for step in range(3)] == list(pairwise(edges))
