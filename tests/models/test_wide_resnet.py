"""Wide residual networks: the published sizes, the forward pass written out, and the protocol."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional

from dpsynth.errors import UsageError
from dpsynth.models import wide_resnet
from dpsynth.models.wide_resnet import Chosen, WideResNet, predict_wide, train_wide, wide_steps

DIGITS = load_digits()
IMAGES = (DIGITS.images[..., None] * 15.9).astype(np.uint8)
LABELS = DIGITS.target.astype(np.int64)
TINY = (10, 1)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(wide_resnet, "LEAST_STEPS", 24)
    yield


@pytest.mark.parametrize(
    ("depth", "factor", "millions"), [(16, 2, 0.7), (40, 4, 8.9), (16, 8, 11.0)]
)
def test_sizes_are_those_that_the_paper_states_for_colour_images(
    depth: int, factor: int, millions: float
) -> None:
    with torch.device("meta"):
        net = WideResNet(10, 3, depth, factor)
    assert round(sum(p.numel() for p in net.parameters()) / 1e6, 1) == millions
    convolutions = [m for m in net.modules() if isinstance(m, torch.nn.Conv2d)]
    assert len(convolutions) == depth
    assert net.name == f"WRN-{depth}-{factor}"


def test_the_forward_pass_is_that_of_its_weights_written_out() -> None:
    torch.manual_seed(0)
    net = WideResNet(5, 3, *TINY).eval()
    for norm in (m for m in net.modules() if isinstance(m, torch.nn.BatchNorm2d)):
        norm.running_mean.uniform_(-0.5, 0.5)  # type: ignore[union-attr]
        norm.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
    w = net.state_dict()

    def active(x: Tensor, at: str) -> Tensor:
        scale = w[f"{at}.weight"] / (w[f"{at}.running_var"] + 1e-5).sqrt()
        shape = (1, -1, 1, 1)
        moved = (x - w[f"{at}.running_mean"].view(shape)) * scale.view(shape)
        return (moved + w[f"{at}.bias"].view(shape)).clamp(min=0)

    images = torch.rand(2, 3, 16, 12)
    x = functional.conv2d(2 * images - 1, w["body.0.weight"], padding=1)
    for block, stride in ((1, 1), (2, 2), (3, 2)):
        own = f"body.{block}"
        a = active(x, f"{own}.first_norm")
        inner = functional.conv2d(a, w[f"{own}.first.weight"], stride=stride, padding=1)
        inner = functional.conv2d(
            active(inner, f"{own}.second_norm"), w[f"{own}.second.weight"], padding=1
        )
        name = f"{own}.shortcut.weight"
        x = inner + (functional.conv2d(a, w[name], stride=stride) if name in w else x)
    assert x.shape == (2, 64, 4, 3)
    wanted = active(x, "body.4").mean(dim=(2, 3)) @ w["head.weight"].T + w["head.bias"]
    torch.testing.assert_close(net(images), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(8, 8, 1), (9, 20, 3), (28, 28, 1), (100, 150, 3)])
def test_any_shape_of_8x8_or_more_enters(shape: tuple[int, int, int]) -> None:
    images = np.zeros((3, *shape), np.uint8)
    assert predict_wide(WideResNet(4, shape[2], *TINY), images).shape == (3,)


def test_smaller_images_and_odd_depths_are_refused() -> None:
    with pytest.raises(UsageError, match="8x8 pixels or more, these are 7x30"):
        predict_wide(WideResNet(4, 1, *TINY), np.zeros((1, 7, 30, 1), np.uint8))
    for depth in (4, 15, 3):
        with pytest.raises(UsageError, match="expected 10, 16, 22"):
            WideResNet(4, 1, depth, 1)


def trained(seed: int = 0, split: int = 400) -> Chosen:
    return train_wide(
        (IMAGES[:300], LABELS[:300]), (IMAGES[split:500], LABELS[split:500]), 10,
        epochs=3, size=TINY, seed=seed,
    )  # fmt: skip


def test_it_learns_and_keeps_the_latest_of_the_best_epochs() -> None:
    steps: list[int] = []
    found = train_wide(
        (IMAGES[:300], LABELS[:300]), (IMAGES[300:500], LABELS[300:500]), 10,
        epochs=3, size=TINY, progress=steps.append,
    )  # fmt: skip
    assert sum(steps) == wide_steps(300, 3) == 24
    best = max(found.accuracies)
    assert found.epoch == 3 - found.accuracies[::-1].index(best) and best > 0.5
    # What is returned is the network of that epoch.
    assert np.mean(predict_wide(found.net, IMAGES[300:500]) == LABELS[300:500]) == best
    assert not found.net.training


def test_the_same_seed_gives_the_same_network_and_another_seed_another() -> None:
    first, again, other = trained(), trained(), trained(seed=1)
    weights = [probe.net.head.weight for probe in (first, again, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_an_earlier_epoch_is_kept_where_the_split_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[np.ndarray] = []
    verdicts = iter([0.2, 0.9, 0.4])

    def scripted(net: WideResNet, images: np.ndarray) -> np.ndarray:
        seen.append(net.head.weight.detach().clone().numpy())
        right = round(next(verdicts) * len(images))
        return np.where(np.arange(len(images)) < right, LABELS[400:500], -1)

    monkeypatch.setattr(wide_resnet, "predict_wide", scripted)
    found = trained()
    assert (found.epoch, found.accuracies) == (2, (0.2, 0.9, 0.4))
    assert np.array_equal(found.net.head.weight.detach().numpy(), seen[1])
    assert not np.array_equal(seen[1], seen[2])


def test_empty_sides_and_foreign_labels_are_refused() -> None:
    good = (IMAGES[:20], LABELS[:20])
    for train, split in ((good, (IMAGES[:0], LABELS[:0])), ((IMAGES[:20], LABELS[:20] + 1), good)):
        with pytest.raises(UsageError, match="labels in"):
            train_wide(train, split, 10, epochs=1, size=TINY)
