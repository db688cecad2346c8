"""Rectified-flow loss and Euler sampler, on fields whose answers are known."""

import pytest
import torch
from torch import Tensor

from dpsynth.errors import UsageError
from dpsynth.models.flow import drop_labels, euler, flow_loss, interpolate
from dpsynth.models.seeding import generator

NULL = 2


def test_interpolation_ends() -> None:
    codes, noise = torch.ones(2, 3), torch.zeros(2, 3)
    assert torch.equal(interpolate(codes, noise, torch.tensor([0.0, 1.0]))[0], noise[0])
    assert torch.equal(interpolate(codes, noise, torch.tensor([0.0, 1.0]))[1], codes[1])
    draws = interpolate(
        codes[:, None].expand(2, 4, 3), torch.zeros(2, 4, 3), torch.full((2, 4), 0.25)
    )
    assert torch.equal(draws, torch.full((2, 4, 3), 0.25))


def test_labels_drop_at_the_rate() -> None:
    labels = torch.arange(20_000) % 2
    dropped = drop_labels(labels, 0.1, NULL, generator(0))
    share = (dropped == NULL).double().mean()
    assert 0.09 < share < 0.11
    assert torch.equal(dropped[dropped != NULL], labels[dropped != NULL])
    assert torch.equal(drop_labels(labels, 0.0, NULL, generator(0)), labels)


def test_loss_of_the_truth_is_zero_and_of_nothing_is_two() -> None:
    """For one fixed code c the field is (c - x) / (1 - t); E||z - xi||^2 / d of N(0, I)s is 2."""
    code = torch.tensor([1.0, -2.0])

    def truth(x: Tensor, t: Tensor, _: Tensor) -> Tensor:
        return (code - x) / (1 - t)[:, None]

    codes, labels = code.expand(64, 2), torch.zeros(64, dtype=torch.long)
    loss = flow_loss(truth, codes, labels, generator=generator(0), high=0.9)
    assert loss < 1e-8
    normal = torch.randn(20_000, 2, generator=generator(1))
    nothing = flow_loss(lambda x, t, y: torch.zeros_like(x), normal, labels, generator=generator(2))
    assert abs(nothing - 2) < 0.05


def test_loss_keeps_to_its_times() -> None:
    seen = []

    def watch(x: Tensor, t: Tensor, _: Tensor) -> Tensor:
        seen.append(t)
        return x

    labels = torch.zeros(1000, dtype=torch.long)
    flow_loss(watch, torch.zeros(1000, 2), labels, generator=generator(0), low=0.25, high=0.5)
    assert 0.25 <= seen[0].min() < 0.26
    assert 0.49 < seen[0].max() < 0.5


def test_euler_visits_equal_times_and_is_exact_on_straight_paths() -> None:
    seen = []

    def straight(x: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        seen.append(float(t[0]))
        return labels[:, None].to(x.dtype).expand_as(x) + 1

    start = torch.zeros(3, 2)
    out = euler(straight, start, torch.tensor([0, 1, 1]), null=NULL, steps=4)
    assert seen == [0.0, 0.25, 0.5, 0.75]
    assert torch.equal(out, torch.tensor([[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]))
    assert torch.equal(start, torch.zeros(3, 2))


@pytest.mark.parametrize("guidance", [0.0, 0.5, 1.0, 1.5, 2.0])
def test_guidance_is_null_plus_g_times_the_difference(guidance: float) -> None:
    def constant(x: Tensor, _: Tensor, labels: Tensor) -> Tensor:
        return labels[:, None].to(x.dtype).expand_as(x)

    labels = torch.tensor([0, 1])
    out = euler(constant, torch.zeros(2, 1), labels, null=NULL, steps=10, guidance=guidance)
    expected = NULL + guidance * (labels.float() - NULL)
    torch.testing.assert_close(out[:, 0], expected)


def test_no_steps_are_refused() -> None:
    with pytest.raises(UsageError, match="at least 1"):
        euler(lambda x, t, y: x, torch.zeros(1, 1), torch.zeros(1).long(), null=1, steps=0)
