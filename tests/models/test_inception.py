"""FID's network: the same numbers as pytorch-fid's own class, from a file the user names."""

from pathlib import Path

import numpy as np
import pytest
import torch
from pytorch_fid import inception as fid

from dpsynth.errors import MissingError, UsageError
from dpsynth.models import inception


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random state dict in pytorch-fid's layout, with weights that keep signals alive."""
    net = inception.build()
    source = torch.Generator().manual_seed(0)
    for tensor in net.state_dict().values():
        if tensor.dim() > 1:
            tensor.normal_(0, (2 / tensor[0].numel()) ** 0.5, generator=source)
    path = tmp_path_factory.mktemp("fid") / "weights.pth"
    torch.save(net.state_dict(), path)
    return path


def test_same_features_as_pytorch_fid(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        fid,
        "load_state_dict_from_url",
        lambda *_, **__: torch.load(weights, weights_only=True),
    )
    theirs = fid.InceptionV3([3]).eval()
    images = np.random.default_rng(0).integers(0, 256, (3, 28, 28, 1), dtype=np.uint8)
    with torch.no_grad():
        pixels = torch.from_numpy(np.repeat(images, 3, axis=3)).permute(0, 3, 1, 2) / 255
        expected = theirs(pixels)[0].flatten(1).numpy()
    network = inception.load_inception(weights)
    got = network.features(images)
    assert got.shape == (3, 2048) and expected.std() > 0
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
    assert "FOREIGN" in network.name  # no one takes these for the published weights


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1)}, tmp_path / "other.pth")
    (tmp_path / "noise.pth").write_bytes(b"noise")
    (tmp_path / "noise.safetensors").write_bytes(b"noise")
    for name in ("other.pth", "noise.pth", "noise.safetensors"):
        with pytest.raises(UsageError):
            inception.load_inception(tmp_path / name)


def test_weights_are_found_or_left_blank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    assert inception.find_weights(None) is None
    with pytest.raises(MissingError):
        inception.find_weights(tmp_path / "absent.pth")
    cached = tmp_path / "checkpoints" / inception.WEIGHTS
    cached.parent.mkdir()
    cached.write_bytes(b"x")
    assert inception.find_weights(None) == cached
