"""LoRA factors in NumPy: the exact product, the same bits however the arrays lie in memory."""

from fractions import Fraction

import numpy as np
import pytest

from dpsynth.artifacts.low_rank import merged, merged_into
from dpsynth.errors import UsageError


def factors(rows=7, columns=5, rank=3, seed=0):
    draw = np.random.default_rng(seed)
    shapes = ((rows, columns), (rank, columns), (rows, rank))
    return [draw.normal(size=shape).astype(np.float32) for shape in shapes]


def test_it_is_the_exact_sum_rounded_once():
    weight, down, up = factors()
    found = merged(weight, down, up, 1.5)
    assert found.dtype == np.float32
    for i, j in np.ndindex(*weight.shape):
        product = sum(Fraction(float(up[i, k])) * Fraction(float(down[k, j])) for k in range(3))
        exact = Fraction(float(weight[i, j])) + Fraction(3, 2) * product
        assert abs(Fraction(float(found[i, j])) - exact) <= abs(exact) * Fraction(1, 2**23)


def test_the_layout_in_memory_changes_no_bit():
    weight, down, up = factors(64, 96, 8)
    whole = merged(weight, down, up, 0.7)
    turned = merged(*(np.asfortranarray(x) for x in (weight, down, up)), 0.7)
    parts = np.concatenate([merged(weight[i : i + 1], down, up[i : i + 1], 0.7) for i in range(64)])
    assert whole.tobytes() == np.ascontiguousarray(turned).tobytes() == parts.tobytes()


def test_factors_come_in_pairs_beside_a_layer():
    weight, down, up = factors()
    start = {"a.weight": weight, "a.bias": weight[:, 0], "b.weight": weight}
    pair = {"a.lora_A.weight": down, "a.lora_B.weight": up}
    assert set(merged_into(start, pair, 2.0)) == {"a.weight"}
    for wrong in (
        {"a.lora_A.weight": down},
        {"a.lora_B.weight": up},
        pair | {"b.weight": weight},
        {"c.lora_A.weight": down, "c.lora_B.weight": up},
        {"a.lora_A.weight": up, "a.lora_B.weight": down},
    ):
        with pytest.raises(UsageError, match="LoRA"):
            merged_into(start, wrong, 2.0)
