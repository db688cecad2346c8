"""The wavelet transform against pywt, and what an orthogonal map keeps."""

import numpy as np
import pytest
import pywt
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpsynth.errors import UsageError
from dpsynth.models.seeding import generator
from dpsynth.models.wavelet.transform import Pyramid, Wavelet, analysis

NAMES = ["haar", "db2", "db4", "db7", "sym4", "sym8", "coif1", "coif2"]
BAD = ["bior2.2", "rbio1.3", "dmey", "morl", "no-such", ""]


def images(count, *shape, dtype=torch.float64, seed=0):
    return torch.rand(count, *shape, generator=generator(seed), dtype=dtype)


cases = st.fixed_dictionaries(
    {
        "name": st.sampled_from(NAMES),
        "levels": st.integers(0, 4),
        "height": st.integers(1, 40),
        "width": st.integers(1, 40),
        "channels": st.sampled_from([1, 3]),
    }
)


@settings(max_examples=40, deadline=None)
@given(cases, st.integers(0, 99))
def test_it_is_what_pywt_computes_and_the_inverse_is_exact(case, seed):
    wavelet = Wavelet(**case)
    real = images(2, case["height"], case["width"], case["channels"], seed=seed)
    found = wavelet(real)
    sides = ((0, 0), *((0, -side % 2 ** case["levels"]) for side in real.shape[1:3]), (0, 0))
    padded = np.pad(real.numpy(), sides, mode="symmetric")
    low = padded
    for detail in reversed(found.details):  # one level at a time: pywt warns of deep ones
        low, bands = pywt.dwt2(low, case["name"], mode="periodization", axes=(1, 2))
        np.testing.assert_allclose(detail, np.stack(bands, axis=1), rtol=0, atol=1e-9)
    np.testing.assert_allclose(found.ll, low, rtol=0, atol=1e-9)
    np.testing.assert_allclose(found.energy().sum(1), (padded**2).sum((1, 2, 3)), rtol=1e-9)
    torch.testing.assert_close(wavelet.inverse(found), real, rtol=0, atol=1e-9)


@settings(max_examples=20, deadline=None)
@given(cases)
def test_single_precision_is_exact_to_a_millionth(case):
    wavelet = Wavelet(**case)
    real = images(2, case["height"], case["width"], case["channels"], dtype=torch.float32)
    pyramid = wavelet(real)
    assert pyramid.ll.dtype == torch.float32
    torch.testing.assert_close(wavelet.inverse(pyramid), real, rtol=0, atol=4e-6)


def test_many_levels_at_once_as_pywts_wavedec2():
    real = images(3, 64, 32, 3)
    found = Wavelet("haar", 4, 64, 32, 3)(real)
    low, *details = pywt.wavedec2(real.numpy(), "haar", "periodization", 4, axes=(1, 2))
    np.testing.assert_allclose(found.ll, low, rtol=0, atol=1e-9)
    for mine, bands in zip(found.details, details, strict=True):
        np.testing.assert_allclose(mine, np.stack(bands, axis=1), rtol=0, atol=1e-9)


def test_haar_by_hand():
    image = torch.tensor([[1.0, 2.0], [5.0, 10.0]]).view(1, 2, 2, 1)
    pyramid = Wavelet("haar", 1, 2, 2, 1)(image)
    assert pyramid.ll.flatten().tolist() == pytest.approx([9.0])
    # LH: top less bottom; HL: left less right; HH: the diagonals.
    assert pyramid.details[0].flatten().tolist() == pytest.approx([-6.0, -3.0, 2.0])


def test_without_levels_ll_is_the_image_to_the_bit():
    wavelet, real = Wavelet("db2", 0, 7, 5, 3), images(2, 7, 5, 3, dtype=torch.float32)
    pyramid = wavelet(real)
    assert torch.equal(pyramid.ll, real)
    assert (pyramid.details, wavelet.sides(0), wavelet.padded) == ((), (7, 5), (7, 5))
    assert torch.equal(wavelet.inverse(pyramid), real)
    assert torch.equal(wavelet.coarse_image(pyramid.ll), real)
    assert pyramid.energy().shape == (2, 1)


def test_bytes_are_read_as_shares_of_255():
    wavelet = Wavelet("haar", 2, 8, 8, 1)
    whole = torch.randint(0, 256, (2, 8, 8, 1), generator=generator(0), dtype=torch.uint8)
    assert torch.equal(wavelet(whole).ll, wavelet(whole.float() / 255).ll)


@pytest.mark.parametrize("name", NAMES)
def test_the_coarse_image_of_a_constant_is_that_constant(name):
    wavelet = Wavelet(name, 3, 16, 24, 3)
    pyramid = wavelet(torch.full((1, 16, 24, 3), 0.3, dtype=torch.float64))
    small = wavelet.coarse_image(pyramid.ll)
    torch.testing.assert_close(small, torch.full_like(small, 0.3))
    torch.testing.assert_close(wavelet.coarse_coefficients(small), pyramid.ll)
    for detail in pyramid.details:
        torch.testing.assert_close(detail, torch.zeros_like(detail), rtol=0, atol=1e-9)


def test_a_prefix_is_the_projection_onto_its_scales():
    wavelet = Wavelet("db2", 3, 20, 28, 1)
    real = images(2, 24, 32, 1)[:, :20, :28]
    pyramid = wavelet(real)
    assert wavelet.sides(0) == wavelet.sides(1) == (3, 4)
    assert wavelet.sides(3) == (12, 16)
    for scale in range(4):
        zeroed = tuple(
            part if s <= scale else torch.zeros_like(part)
            for s, part in enumerate(pyramid.details, 1)
        )
        assert torch.equal(
            wavelet.inverse(pyramid.upto(scale)), wavelet.inverse(Pyramid(pyramid.ll, zeroed))
        )


@pytest.mark.parametrize("name", BAD)
def test_other_wavelets_are_refused(name):
    with pytest.raises(UsageError) as error:
        analysis(name, 8)
    assert "haar" in (error.value.hint or "")


def test_wrong_sizes_are_refused():
    wavelet = Wavelet("haar", 2, 8, 8, 1)
    with pytest.raises(UsageError, match="expected"):
        wavelet(torch.zeros(1, 8, 9, 1))
    with pytest.raises(UsageError, match="LL of"):
        wavelet.inverse(Pyramid(torch.zeros(1, 4, 4, 1), ()))
    with pytest.raises(UsageError, match="levels"):
        Wavelet("haar", -1, 8, 8, 1)
