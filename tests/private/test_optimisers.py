"""Optimisers on noisy gradients: torch's where they are torch's, DP-AdamBC by its formula."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpsynth.accounting.statistics import ClippedGradientSum
from dpsynth.artifacts.lock import Slot
from dpsynth.errors import PlanError, UsageError
from dpsynth.planning.optimizer import Adam, AdamW, Schedule, Sgd
from dpsynth.planning.training import Train
from dpsynth.private.optimisers import build_optimiser, gradient_noise, learning_rate, state_names


def settings(optimizer=None, steps=40, **changes):
    chosen = {} if optimizer is None else {"optimizer": optimizer}
    return Train(**({"rate": 0.1, "steps": steps, "learning_rate": 0.02} | chosen | changes))


def weights(seed=0):
    source = torch.Generator().manual_seed(seed)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=source)) for shape in ((4, 3), (5,), ())
    ]


def gradients(steps, seed=1):
    source = torch.Generator().manual_seed(seed)
    return [[torch.randn(w.shape, generator=source) for w in weights()] for _ in range(steps)]


def walk(optimiser, own, steps=12):
    for step in gradients(steps):
        for weight, gradient in zip(own, step, strict=True):
            weight.grad = gradient.clone()
        optimiser.step()
    return [w.detach().clone() for w in own]


TORCH = [
    (Sgd(kind="sgd"), lambda w: torch.optim.SGD(w, lr=0.02)),
    (Sgd(kind="sgd", momentum=0.8), lambda w: torch.optim.SGD(w, lr=0.02, momentum=0.8)),
    (None, lambda w: torch.optim.Adam(w, lr=0.02)),
    (
        Adam(beta1=0.8, beta2=0.95, eps=1e-3),
        lambda w: torch.optim.Adam(w, lr=0.02, betas=(0.8, 0.95), eps=1e-3),
    ),
    (
        AdamW(kind="adamw", weight_decay=0.3),
        lambda w: torch.optim.AdamW(w, lr=0.02, weight_decay=0.3),
    ),
]


@pytest.mark.parametrize(("chosen", "reference"), TORCH)
def test_sgd_adam_and_adamw_are_torchs_to_the_bit(chosen, reference):
    own, theirs = weights(), weights()
    ours = walk(build_optimiser(own, settings(chosen), 0.1), own)
    for found, expected in zip(ours, walk(reference(theirs), theirs), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("chosen", [Sgd(kind="sgd", momentum=0.5), AdamW(kind="adamw")])
def test_the_keys_of_the_plan_matter(chosen):
    own, plain = weights(), weights()
    other = chosen.model_copy(update={"momentum": 0.0, "weight_decay": 0.0})
    first = walk(build_optimiser(own, settings(chosen), 0.1), own)
    second = walk(build_optimiser(plain, settings(other), 0.1), plain)
    assert not any(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def slow_adam_bc(weight, steps, *, noise, floor, decay, beta1=0.9, beta2=0.999, eps=1e-8):
    """Tang et al., algorithm 1, one number at a time in double precision."""
    first = second = 0.0
    for count, gradient in enumerate(steps, 1):
        first = beta1 * first + (1 - beta1) * gradient
        second = beta2 * second + (1 - beta2) * gradient**2
        signal = second / (1 - beta2**count) - noise**2
        bottom = math.sqrt(max(signal, floor * noise**2)) + eps
        weight = weight * (1 - 0.02 * decay) - 0.02 * first / (1 - beta1**count) / bottom
    return weight


@pytest.mark.parametrize("kind", ["adam", "adamw"])
@pytest.mark.parametrize("noise", [0.1, 0.8, 5.0])
def test_dp_adam_bc_follows_the_slow_formula(kind, noise):
    more = {"weight_decay": 0.3} if kind == "adamw" else {}
    make = AdamW if kind == "adamw" else Adam
    chosen = make(kind=kind, bias_correction=True, floor=0.2, **more)
    own = weights()
    found = walk(build_optimiser(own, settings(chosen), noise), own)
    for index, (start, end) in enumerate(zip(weights(), found, strict=True)):
        for place in range(start.numel()):
            line = [float(step[index].reshape(-1)[place]) for step in gradients(12)]
            expected = slow_adam_bc(
                float(start.detach().reshape(-1)[place]), line, noise=noise, floor=0.2,
                decay=more.get("weight_decay", 0.0),
            )  # fmt: skip
            assert float(end.reshape(-1)[place]) == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("kind", ["adam", "adamw"])
def test_without_noise_bias_correction_changes_nothing(kind):
    own, plain = weights(), weights()
    make = AdamW if kind == "adamw" else Adam
    found = walk(build_optimiser(own, settings(make(kind=kind, bias_correction=True)), 0.0), own)
    expected = walk(build_optimiser(plain, settings(make(kind=kind)), 0.0), plain)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_bias_correction_takes_out_the_noise_and_adam_does_not():
    """A weak gradient under strong noise: corrected steps are as long as without the noise."""
    signal, noise, steps = 0.3, 1.0, 1500
    source = torch.Generator().manual_seed(3)
    moved = {}
    for name, correct in (("adam", False), ("bc", True)):
        weight = torch.nn.Parameter(torch.zeros(400))
        chosen = Adam(bias_correction=correct, floor=1e-3)
        optimiser = build_optimiser([weight], settings(chosen), noise)
        source.manual_seed(3)
        for step in range(steps):
            if step == steps - 200:
                start = weight.detach().clone()
            weight.grad = signal + noise * torch.randn(400, generator=source)
            optimiser.step()
        moved[name] = -float((weight.detach() - start).mean()) / 200 / 0.02
    # Adam divides by sqrt(signal^2 + noise^2); without the noise the step would be one.
    assert moved["adam"] == pytest.approx(signal / math.hypot(signal, noise), rel=0.05)
    assert 0.9 < moved["bc"] < 1.3


@pytest.mark.parametrize("noise", [-1.0, float("nan"), float("inf")])
def test_meaningless_noise_is_refused(noise):
    with pytest.raises(UsageError, match="noise"):
        build_optimiser(weights(), settings(Adam(bias_correction=True)), noise)


def test_a_private_gradient_is_given_once():
    own = weights()
    with pytest.raises(UsageError):
        build_optimiser(own, settings(Adam(bias_correction=True)), 0.1).step(lambda: 0.0)


def test_what_each_optimiser_keeps():
    assert state_names(settings()) == ("exp_avg", "exp_avg_sq")
    assert state_names(settings(AdamW(kind="adamw"))) == ("exp_avg", "exp_avg_sq")
    assert state_names(settings(Sgd(kind="sgd", momentum=0.9))) == ("momentum_buffer",)
    assert state_names(settings(Sgd(kind="sgd"))) == ()


@given(
    kind=st.sampled_from(["constant", "cosine", "linear"]),
    steps=st.integers(1, 300),
    data=st.data(),
)
def test_the_learning_rate_follows_its_formula(kind, steps, data):
    warmup = data.draw(st.integers(0, steps - 1))
    plan = settings(steps=steps, schedule=Schedule(kind=kind, warmup=warmup))
    rates = [learning_rate(plan, step) for step in range(steps)]
    for step, rate in enumerate(rates):
        done = (step - warmup) / (steps - warmup)
        shape = {"constant": 1.0, "cosine": math.cos(math.pi * done / 2) ** 2, "linear": 1 - done}
        expected = 0.02 * ((step + 1) / warmup if step < warmup else shape[kind])
        assert rate == pytest.approx(expected, rel=1e-9)
        assert 0 < rate <= 0.02
    assert rates[warmup] == 0.02
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)


def test_without_a_schedule_the_rate_is_the_plans_own_number():
    assert {learning_rate(settings(), step) for step in (0, 1, 39, 400)} == {0.02}


def slot(std=3.0, rate=0.1):
    return Slot(1, "train", "train-0001", ClippedGradientSum(1.0), std, rate, 5)


def test_the_noise_of_a_gradient_comes_from_the_lock():
    assert gradient_noise([slot(), slot()], 600) == pytest.approx(3.0 / 60)
    for slots in ([], [slot(), slot(std=4.0)], [slot(), slot(rate=0.2)], [slot(rate=None)]):
        with pytest.raises(PlanError):
            gradient_noise(slots, 600)
