"""The rules for counts speak exactly where the measures themselves refuse."""

import numpy as np
import pytest

from dpsynth.assess.counts import RULES, doubt, refusal, shortage
from dpsynth.assess.density import density_coverage
from dpsynth.assess.diversity import within_class
from dpsynth.assess.kernel import kernel_distance
from dpsynth.assess.metrics import frechet_distance, precision_recall
from dpsynth.errors import UsageError

MEASURES = {
    "frechet": frechet_distance,
    "precision": precision_recall,
    "recall": precision_recall,
    "density": density_coverage,
    "coverage": density_coverage,
    "kernel": kernel_distance,
}


@pytest.mark.parametrize("measure", sorted(MEASURES))
def test_refusal_is_where_the_measure_refuses(measure: str) -> None:
    points = np.random.default_rng(0).normal(size=(20, 4))
    least = RULES[measure].least(4)
    MEASURES[measure](points[:least], points[:least])
    assert refusal(measure, least, 20, 4) is None
    with pytest.raises(UsageError):
        MEASURES[measure](points[: least - 1], points[: least - 1])
    said = refusal(measure, 20, least - 1, 4)
    assert said is not None
    assert f"at least {least} images" in said
    assert shortage(measure, 20, least - 1, 4) == said


def test_diversity_is_refused_below_two() -> None:
    assert within_class(np.ones((1, 2)), np.zeros(1, dtype=np.int64), 1) == [None]
    assert refusal("diversity", 1, 1, 2) is not None
    assert refusal("diversity", 2, 2, 2) is None


def test_doubt_ends_where_counts_suffice() -> None:
    for measure, rule in RULES.items():
        enough = rule.enough(84)
        assert doubt(measure, enough, enough, 84) is None
        said = doubt(measure, enough, enough - 1, 84)
        assert said is not None
        assert f"{enough - 1:,} images" in said
        assert shortage(measure, 10_000, 10_000, 84) is None


def test_inception_at_ten_thousand_is_said_to_be_biased() -> None:
    said = shortage("frechet", 10_000, 10_000, 2048)
    assert said is not None
    assert "biased upwards" in said
    assert "20,480" in said


def test_smaller_subsets_are_said() -> None:
    said = shortage("kernel", 500, 10_000, 84)
    assert said is not None
    assert "subsets of 500" in said
    with pytest.raises(UsageError, match="no measure"):
        shortage("beauty", 1, 1, 1)
