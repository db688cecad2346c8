"""Settings of an embedding: strict, and their sizes are those of the maps."""

import math

import pytest
from pydantic import ValidationError

from dpsynth.planning.embedding import Embedding, EmbeddingBlocks


@pytest.mark.parametrize(
    "bad",
    [
        {"kind": "laplace"},
        {"features": 3},
        {"features": 0},
        {"bandwidth": 0.0},
        {"bandwidth": math.nan},
        {"alpha": 1.2},
        {"alpha": 1.0, "pairs": 0},
        {"weight": 0.0},
        {"blocks": {"count": 0.0}},
        {"generator": {"batch": 1}},
        {"unknown": 1},
    ],
)
def test_nonsense_is_refused(bad):
    with pytest.raises(ValidationError):
        Embedding.model_validate(bad)


@pytest.mark.parametrize("count", [1e-6, 0.01, 1.0, 1e6])
def test_weights_have_norm_one(count):
    assert math.isclose(math.hypot(*EmbeddingBlocks(count=count).weights()), 1.0, rel_tol=1e-12)
