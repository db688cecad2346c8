"""Domain rate on scikit-learn's digits against other images."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from dpsynth.assess import domain
from dpsynth.assess.domain import domain_rate
from dpsynth.errors import UsageError

DIGITS = (load_digits().images[..., None] * 15.9).astype(np.uint8)
OTHER = np.ascontiguousarray(DIGITS[900:1500, ::-1].swapaxes(1, 2))  # digits on their side


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(domain, "STEPS", 60)
    yield


def test_the_rate_of_a_mixture_is_its_share_of_private_images(tmp_path: Path) -> None:
    samples = np.concatenate([DIGITS[500:650], OTHER[:50]])
    steps: list[int] = []
    found = domain_rate(
        samples, DIGITS[:500], DIGITS[1500:], OTHER, cache=tmp_path, progress=steps.append
    )
    assert sum(steps) == 60 and found.hits.shape == (200,)
    assert found.synthetic == pytest.approx(0.75, abs=0.08)
    assert found.ceiling > 0.9 and found.floor < 0.15
    assert found.counts == {"synthetic": 200, "ceiling": 297, "floor": 60, "train": 500}
    json.dumps(found.to_json(), allow_nan=False)
    # The network is kept: the same again, without training.
    again = domain_rate(samples, DIGITS[:500], DIGITS[1500:], OTHER, cache=tmp_path)
    assert np.array_equal(again.hits, found.hits)


def test_images_that_the_floor_is_taken_of_are_not_trained_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trained: list[np.ndarray] = []
    asked: list[np.ndarray] = []
    real_space, real_predict = domain.lenet_space, domain.predict

    def watched(images: np.ndarray, labels: np.ndarray, *args: object, **kwargs: object) -> object:
        trained.append(images)
        assert np.bincount(labels).tolist() == [400, 400]
        return real_space(images, labels, *args, **kwargs)  # type: ignore[arg-type]

    def seen(net: object, images: np.ndarray) -> np.ndarray:
        asked.append(images)
        return real_predict(net, images)  # type: ignore[arg-type]

    monkeypatch.setattr(domain, "lenet_space", watched)
    monkeypatch.setattr(domain, "predict", seen)
    domain_rate(DIGITS[:20], DIGITS[20:420], DIGITS[1500:], OTHER, cache=None)
    known = {image.tobytes() for image in trained[0]}
    assert not any(image.tobytes() in known for image in asked[-1]) and len(asked[-1]) == 60


def test_a_missing_side_is_refused() -> None:
    for samples, public in ((DIGITS[:0], OTHER), (DIGITS[:5], OTHER[:9])):
        with pytest.raises(UsageError, match="10 public images"):
            domain_rate(samples, DIGITS, DIGITS, public, cache=None)
