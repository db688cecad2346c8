"""LPIPS by caption pairs, with random weights on disk; its arithmetic against one written out."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional
from torchvision.models import alexnet

from dpsynth.assess.perceptual import (
    SIDE,
    WEIGHTS,
    Perceptual,
    caption_pairs,
    find_backbone,
    load_perceptual,
    lpips_by_caption,
)
from dpsynth.errors import MissingError, UsageError

WIDTHS = (64, 192, 384, 256, 256)
TAPS = (1, 4, 7, 9, 11)
"""Layers of AlexNet's features after each ReLU."""
RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    pytest.importorskip("lpips", reason="the package lpips is not installed")
    folder = tmp_path_factory.mktemp("weights")
    torch.manual_seed(0)
    backbone, heads = folder / WEIGHTS, folder / "alex.pth"
    torch.save(
        {f"features.{k}": v for k, v in alexnet(weights=None).features.state_dict().items()},
        backbone,
    )
    torch.save(
        {f"lin{i}.model.1.weight": torch.rand(1, width, 1, 1) for i, width in enumerate(WIDTHS)},
        heads,
    )
    return backbone, heads


@pytest.fixture(scope="module")
def loaded(weights: tuple[Path, Path]) -> Perceptual:
    return load_perceptual(*weights)


def images(count: int, side: int = SIDE, channels: int = 3) -> np.ndarray:
    return RNG.integers(0, 256, (count, side, side, channels), dtype=np.uint8)


def written_out(weights: tuple[Path, Path], first: np.ndarray, second: np.ndarray) -> float:
    """Zhang et al. (2018), eq. 1, for one pair of RGB images, straight from the files."""
    state = torch.load(weights[0], weights_only=True)
    net = alexnet(weights=None).features
    net.load_state_dict({key.removeprefix("features."): value for key, value in state.items()})
    heads = list(torch.load(weights[1], weights_only=True).values())
    shift, scale = torch.tensor([-0.030, -0.088, -0.188]), torch.tensor([0.458, 0.448, 0.450])
    sides = [
        ((torch.tensor(x) / 255 * 2 - 1 - shift) / scale).permute(2, 0, 1)[None]
        for x in (first, second)
    ]
    total = 0.0
    with torch.no_grad():
        for head, tap in zip(heads, TAPS, strict=True):
            left, right = (net[: tap + 1](side)[0].double() for side in sides)
            left, right = left / left.norm(dim=0), right / right.norm(dim=0)
            total += float((head[0].double() * (left - right) ** 2).sum(dim=0).mean())
    return total


def test_distance_against_the_definition(weights: tuple[Path, Path], loaded: Perceptual) -> None:
    first, second = images(2), images(2)
    found = loaded.distances(first, second)
    for i in range(2):
        assert found[i] == pytest.approx(written_out(weights, first[i], second[i]), rel=1e-4)
    assert loaded.distances(first, first) == pytest.approx(np.zeros(2), abs=1e-7)
    assert "FOREIGN" in loaded.name


def test_small_grey_images_are_enlarged_and_copied(loaded: Perceptual) -> None:
    first, second = images(2, 28, 1), images(2, 28, 1)

    def enlarged(batch: np.ndarray) -> np.ndarray:
        grey = torch.tensor(batch[..., 0], dtype=torch.float32)[:, None]
        large = functional.interpolate(grey, scale_factor=SIDE / 28, mode="bilinear")
        return np.repeat(large.numpy().transpose(0, 2, 3, 1).round().astype(np.uint8), 3, axis=3)

    # Rounding to whole grey levels in between costs the last digits.
    by_hand = loaded.distances(enlarged(first), enlarged(second))
    assert loaded.distances(first, second) == pytest.approx(by_hand, rel=1e-2)
    wide = RNG.integers(0, 256, (1, 20, 45, 3), dtype=np.uint8)
    assert np.isfinite(loaded.distances(wide, wide[:, ::-1])).all()
    with pytest.raises(UsageError, match="one shape"):
        loaded.distances(first, images(2, 32, 1))


def test_pairs_share_their_caption_and_use_an_image_once() -> None:
    ours = [f"a {word}" for word in RNG.choice(["cat", "dog", "bird", "fox"], 60)]
    theirs = [f"a {word}" for word in RNG.choice(["cat", "dog", "bird", "cow"], 45)]
    pairs = caption_pairs(ours, theirs)
    assert all(ours[i] == theirs[j] for i, j in pairs)
    assert len(set(pairs[:, 0])) == len(set(pairs[:, 1])) == len(pairs)
    assert len(pairs) == sum(
        min(ours.count(c), theirs.count(c)) for c in ("a cat", "a dog", "a bird")
    )
    few = caption_pairs(ours, theirs, most=7)
    assert {tuple(p) for p in few} <= {tuple(p) for p in pairs}
    assert len(few) == 7
    assert caption_pairs(["x"], ["y"]).shape == (0, 2)


def test_score_is_the_mean_over_pairs(loaded: Perceptual) -> None:
    samples, reference = images(8), images(6)
    ours, theirs = ["a", "a", "b", "b", "c", "c", "d", "d"], ["a", "a", "b", "b", "e", "e"]
    found = lpips_by_caption(samples, ours, reference, theirs, loaded)
    pairs = caption_pairs(ours, theirs)
    values = loaded.distances(samples[pairs[:, 0]], reference[pairs[:, 1]])
    assert found.mean == pytest.approx(values.mean())
    assert (found.pairs, found.captions, found.unmatched) == (4, 2, 2)
    assert found.interval.low <= found.mean <= found.interval.high
    assert "captions and networks are fixed" in found.interval.method
    # The same image under its caption: nothing is closer.
    own = [f"caption {i}" for i in range(8)]
    assert lpips_by_caption(samples, own, samples, own, loaded).mean == pytest.approx(0, abs=1e-7)


def test_many_captions_are_resampled_whole(loaded: Perceptual) -> None:
    samples = images(40)
    names = [f"caption {i}" for i in range(40)]
    found = lpips_by_caption(samples, names, samples[::-1].copy(), names, loaded)
    assert "whole groups" in found.interval.method
    with pytest.raises(UsageError, match="no caption"):
        lpips_by_caption(samples, names, samples, ["x"] * 40, loaded)
    with pytest.raises(UsageError, match="one caption"):
        lpips_by_caption(samples, names[:3], samples, names, loaded)


def test_what_is_wrong_with_weights_is_said(
    weights: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone, heads = weights
    with pytest.raises(MissingError, match="no AlexNet weights"):
        find_backbone(tmp_path / "absent.pth")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    assert find_backbone(None) is None
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    (tmp_path / "hub" / "checkpoints" / WEIGHTS).write_bytes(b"")
    assert find_backbone(None) is not None
    assert find_backbone(backbone) == backbone
    text = tmp_path / "text.pth"
    text.write_text("not weights")
    for pair in ((text, heads), (backbone, text), (heads, heads), (backbone, backbone)):
        with pytest.raises(UsageError, match="not hold"):
            load_perceptual(*pair)
    with pytest.raises(MissingError, match="no LPIPS weights"):
        load_perceptual(backbone, tmp_path / "none.pth")


def test_heads_of_the_package_and_safetensors(weights: tuple[Path, Path], tmp_path: Path) -> None:
    from safetensors.torch import save_file

    state = torch.load(weights[0], weights_only=True)
    save_file(state, tmp_path / "alexnet.safetensors")
    loaded = load_perceptual(tmp_path / "alexnet.safetensors")
    heads = [parameter for name, parameter in loaded.net.named_parameters() if "lin" in name]
    assert all((head >= 0).all() for head in heads)  # the published heads are non-negative
    assert np.isfinite(loaded.distances(images(1), images(1))).all()


def test_without_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "lpips", None)
    with pytest.raises(MissingError, match="lpips"):
        load_perceptual(tmp_path / "any.pth")
