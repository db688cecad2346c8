"""Training without clip and noise: against arithmetic by hand, and against the private steps."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from clikit import DIGITS
from safetensors.numpy import load_file
from torch import Tensor, nn

from dpsynth.artifacts.rooms import RunDir
from dpsynth.assess.audit.controls import SilentNoise
from dpsynth.assess.nonprivate.learning import PHYSICAL, learn, mean_gradient
from dpsynth.assess.nonprivate.making import reference
from dpsynth.assess.nonprivate.room import Place
from dpsynth.planning.optimizer import Sgd
from dpsynth.planning.training import Train
from dpsynth.planning.verify import make_run
from dpsynth.private.encoding import private_stream
from dpsynth.private.engine import PerExampleClipper
from dpsynth.private.steps import PrivateCodes, run_chunk
from dpsynth.private.tasks import load_task
from dpsynth.private.training_state import TrainingState
from dpsynth.public.pretrain import pretrain


def _squares(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x)[:, 0] - y).square()


def _line(count: int) -> tuple[nn.Linear, Tensor, Tensor]:
    source = torch.Generator().manual_seed(3)
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.5, -1.0]]))
        model.bias.zero_()
    return model, torch.randn(count, 2, generator=source), torch.randn(count, generator=source)


def test_the_mean_gradient_is_the_sum_over_the_declared_divisor() -> None:
    """By hand: d/dw (w.x + b - y)^2 = 2 (w.x + b - y) x, over parts of PHYSICAL and a rest."""
    count = 2 * PHYSICAL + 3
    model, x, y = _line(count)
    found, losses = mean_gradient(model, _squares, (x, y), divisor=50.0)
    apart = x.double() @ torch.tensor([0.5, -1.0]).double() - y.double()
    assert losses.double().numpy() == pytest.approx(apart.square().numpy(), rel=1e-5)
    weight = (2 * apart[:, None] * x.double()).sum(0) / 50.0
    assert found["weight"][0].numpy() == pytest.approx(weight.numpy(), rel=1e-4)
    assert float(found["bias"]) == pytest.approx(float(2 * apart.sum() / 50.0), rel=1e-4)


def test_no_gradient_is_clipped() -> None:
    """One far point's gradient is as large as it is."""
    model, x, y = _line(1)
    found, _ = mean_gradient(model, _squares, (x * 1e4, y), divisor=1.0)
    assert float(found["weight"].norm()) > 1e6


def test_a_unit_that_is_not_finite_counts_as_zero_and_no_other_does() -> None:
    model, x, y = _line(9)
    wanted, _ = mean_gradient(model, _squares, (x[1:], y[1:]), divisor=1.0)
    x[0, 1] = float("nan")
    found, losses = mean_gradient(model, _squares, (x, y), divisor=1.0)
    assert len(losses) == 8
    assert found["weight"].numpy() == pytest.approx(wanted["weight"].numpy(), rel=1e-5)


def test_an_empty_batch_has_a_gradient_of_zero() -> None:
    model, x, y = _line(2)
    found, losses = mean_gradient(model, _squares, (x[:0], y[:0]), divisor=5.0)
    assert not any(one.any() for one in found.values())
    assert len(losses) == 0


@dataclass
class _AllRecords:
    """Work whose batches hold every record."""

    capacity: int

    def batch(self, data: PrivateCodes, **_: object) -> tuple[Tensor, ...]:
        return data.codes, data.labels.float()


class _Task:
    losses = staticmethod(_squares)

    def __init__(self, model: nn.Module, capacity: int) -> None:
        self.model, self.work = model, _AllRecords(capacity)


def test_plain_descent_by_hand_and_a_resumed_one(tmp_path: Path) -> None:
    """w <- w - lr g for each step, whether or not training was cut off in between."""
    settings = Train(
        rate=0.5, steps=4, chunk=2, learning_rate=0.1, ema=0.0, optimizer=Sgd(kind="sgd")
    )
    model, x, _ = _line(20)
    labels = torch.arange(20) % 3
    weight, bias = np.array([0.5, -1.0]), 0.0
    for _ in range(4):
        apart = x.numpy() @ weight + bias - labels.numpy()
        weight = weight - 0.1 * (2 * apart[:, None] * x.numpy()).sum(0) / (0.5 * 40)
        bias -= 0.1 * 2 * apart.sum() / (0.5 * 40)
    lock = type("Lock", (), {"unsafe_seed": 7})
    place, data = Place(RunDir.create(tmp_path / "run"), "nonprivate"), PrivateCodes(x, labels)
    whole = learn(_Task(model, 40), data, settings, lock, place=place, recipe="a" * 64)
    assert whole.weight.detach().numpy()[0] == pytest.approx(weight, rel=1e-4)
    assert whole.bias.item() == pytest.approx(bias, rel=1e-3)
    lines = [json.loads(line) for line in place.log.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]

    place.drop_checkpoints()
    half = settings.model_copy(update={"steps": 2})
    learn(_Task(_line(20)[0], 40), data, half, lock, place=place, recipe="b" * 64)
    again = learn(_Task(_line(20)[0], 40), data, settings, lock, place=place, recipe="b" * 64)
    assert again.weight.detach().numpy()[0] == pytest.approx(weight, rel=1e-4)
    assert len(place.log.read_text().splitlines()) == 4
    assert oct(place.log.stat().st_mode & 0o777) == "0o600"


FEW = DIGITS.replace("fraction: 0.2", "fraction: 0.8")
PLAN = f"""\
version: 1
name: same-steps
budget: {{epsilon: 8.0, delta: 1e-5}}
{FEW}
public: [{{kind: letters, count: 100}}]
representation: {{kind: pca, code: 6}}
stages:
  train: {{rate: 0.05, steps: 3, chunk: 1, multiplicity: 2, buckets: 3, clip: 64.0,
    ema: 0.0, learning_rate: 1.0, optimizer: {{kind: sgd}}}}
velocity: {{width: 8, depth: 1}}
prior: {{steps: 3, batch: 32}}
sampling: {{method: flow, count: 10, steps: 2}}
"""


def test_it_is_private_training_with_a_huge_clip_and_silent_noise(tmp_path: Path) -> None:
    """The engine's own steps on the same coins, its noise replaced by zeros, end at one model."""
    (tmp_path / "plan.yaml").write_text(PLAN)
    verified = make_run(tmp_path / "plan.yaml", tmp_path / "run", unsafe_seed=11)
    pretrain(verified)
    reference(verified, "nonprivate", 10)

    found = load_file(Place(verified.run, "nonprivate").model)

    plan, settings = verified.plan, verified.plan.stages.train
    task = load_task(verified.run, plan, verified.lock)
    before = {name: p.detach().clone() for name, p in task.model.named_parameters()}
    data = task.take(private_stream(verified, task.space))
    state = TrainingState(task.model, settings, noise=0.0)
    with PerExampleClipper(task.model, task.losses, settings.clip) as clipper:
        for slot in verified.lock.stage_slots("train"):
            noise = SilentNoise.unsafe(11, f"reference-nonprivate-{state.step}")
            log = run_chunk(slot, data, task.work, state, clipper=clipper, noise=noise)
            assert all(line["clipped"] == 0.0 for line in log)
    wanted = {name: p.detach() for name, p in state.averaged().named_parameters()}
    moved = max(float((wanted[name] - before[name]).abs().max()) for name in before)
    apart = max(float(np.abs(found[name] - wanted[name].numpy()).max()) for name in before)
    assert apart < 1e-3 * moved
