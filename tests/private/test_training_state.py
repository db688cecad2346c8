"""Training goes on from a checkpoint bit for bit, under every optimiser and schedule."""

import pytest
import torch
from torch import nn

from dpsynth.artifacts.tensors import load_tensors, save_tensors
from dpsynth.errors import UsageError
from dpsynth.planning.optimizer import Adam, AdamW, Schedule, Sgd
from dpsynth.planning.training import Train
from dpsynth.private.optimisers import learning_rate
from dpsynth.private.training_state import FORMAT, TrainingState

KINDS = {
    "sgd": Sgd(kind="sgd"),
    "momentum": Sgd(kind="sgd", momentum=0.9),
    "adam": Adam(),
    "adam-bc": Adam(bias_correction=True),
    "adamw": AdamW(kind="adamw", weight_decay=0.1),
    "adamw-bc": AdamW(kind="adamw", weight_decay=0.1, bias_correction=True),
}
SCHEDULES = [Schedule(), Schedule(kind="cosine", warmup=3), Schedule(kind="linear")]


def state(optimizer=KINDS["adam"], schedule=SCHEDULES[0], seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    settings = Train(rate=0.1, steps=12, optimizer=optimizer, schedule=schedule, ema=0.9)
    return TrainingState(model, settings, noise=0.3)


def advance(carried, first, last):
    for step in range(first, last):
        source = torch.Generator().manual_seed(step)
        noisy = {
            name: torch.randn(p.shape, generator=source, dtype=torch.float64)
            for name, p in carried.model.named_parameters()
        }
        carried.apply(noisy)
    return carried


def same(first, second):
    pairs = zip(first.model.parameters(), second.model.parameters(), strict=True)
    averages = ((value, second.average[name]) for name, value in first.average.items())
    return all(torch.equal(a, b) for a, b in (*pairs, *averages))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.kind)
def test_a_resumed_run_ends_as_an_uninterrupted_one(kind, schedule, tmp_path):
    chosen = KINDS[kind]
    whole = advance(state(chosen, schedule), 0, 12)
    advance(state(chosen, schedule), 0, 5).save(tmp_path / "half.safetensors")
    resumed = state(chosen, schedule, seed=9)
    resumed.load(tmp_path / "half.safetensors")
    assert resumed.step == 5
    assert same(advance(resumed, 5, 12), whole)
    assert not same(advance(state(chosen, schedule), 5, 12), whole)


@pytest.mark.parametrize("kind", ["momentum", "adam", "adam-bc", "adamw"])
def test_what_the_optimiser_keeps_matters_in_a_resume(kind, tmp_path):
    """The control: a checkpoint whose optimiser state is lost ends elsewhere."""
    path = tmp_path / "half.safetensors"
    advance(state(KINDS[kind]), 0, 5).save(path)
    arrays, metadata = load_tensors(path)
    lost = {
        name: value if name.startswith(("model/", "average/")) else value * 0
        for name, value in arrays.items()
    }
    save_tensors(path, lost, metadata)
    resumed = state(KINDS[kind])
    resumed.load(path)
    assert not same(advance(resumed, 5, 12), advance(state(KINDS[kind]), 0, 12))


def test_the_default_is_torchs_adam_and_the_average_as_they_were():
    own = advance(state(), 0, 12)
    theirs = state().model
    adam = torch.optim.Adam(theirs.parameters(), lr=1e-3)
    average = [p.detach().clone() for p in theirs.parameters()]
    for step in range(12):
        source = torch.Generator().manual_seed(step)
        for p in theirs.parameters():
            p.grad = torch.randn(p.shape, generator=source, dtype=torch.float64).to(p.dtype)
        adam.step()
        for mean, p in zip(average, theirs.parameters(), strict=True):
            mean.lerp_(p.detach(), 1 - 0.9)
    for ours, p in zip(own.model.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(ours, p)
    for ours, mean in zip(own.averaged().parameters(), average, strict=True):
        assert torch.equal(ours, mean)


def test_a_checkpoint_of_before_the_choice_still_loads_for_adam_alone(tmp_path):
    path = tmp_path / "old.safetensors"
    advance(state(), 0, 5).save(path)
    arrays, metadata = load_tensors(path)
    assert metadata == {"format": FORMAT, "room": "curator", "step": "5", "optimizer": "adam"}
    del metadata["optimizer"]
    save_tensors(path, arrays, metadata)
    resumed = state(seed=9)
    resumed.load(path)
    assert same(advance(resumed, 5, 12), advance(state(), 0, 12))
    for kind in ("sgd", "momentum", "adamw"):
        with pytest.raises(UsageError, match="not a checkpoint"):
            state(KINDS[kind]).load(path)


def test_a_checkpoint_of_another_model_or_format_is_refused(tmp_path):
    path = tmp_path / "half.safetensors"
    advance(state(), 0, 2).save(path)
    arrays, metadata = load_tensors(path)
    for changed, facts in (
        (arrays | {"model/0.weight": arrays["model/0.weight"].T}, metadata),
        ({n: v for n, v in arrays.items() if n != "exp_avg/0.bias"}, metadata),
        (arrays, metadata | {"format": "dpsynth-checkpoint-0"}),
    ):
        save_tensors(path, changed, facts)
        with pytest.raises(UsageError, match="not a checkpoint"):
            state().load(path)


def test_nothing_is_saved_before_the_first_step(tmp_path):
    with pytest.raises(UsageError, match="at least one step"):
        state().save(tmp_path / "none.safetensors")
    assert not list(tmp_path.iterdir())


def test_every_step_takes_its_own_learning_rate():
    """SGD moves by rate times gradient, which shows the rate."""
    schedule = Schedule(kind="cosine", warmup=4)
    carried = state(KINDS["sgd"], schedule)
    ones = {n: torch.ones_like(p).double() for n, p in carried.model.named_parameters()}
    for step in range(12):
        before = carried.model[0].bias.detach().double()
        carried.apply(ones)
        moved = before - carried.model[0].bias.detach().double()
        expected = learning_rate(carried._settings, step)
        torch.testing.assert_close(moved, torch.full((5,), expected).double(), rtol=0, atol=1e-7)


def test_weights_that_are_not_trained_stay_and_are_not_asked_for():
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    model[0].requires_grad_(False)
    frozen = model[0].weight.clone()
    carried = TrainingState(model, Train(rate=0.1, steps=2), noise=0.1)
    carried.apply({"1.weight": torch.ones(2, 5).double(), "1.bias": torch.ones(2).double()})
    assert torch.equal(model[0].weight, frozen)
    assert set(carried.average) == {"1.weight", "1.bias"}
