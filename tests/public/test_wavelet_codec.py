"""The LL0 code space against PyWavelets itself, in whole numbers, and record by record."""

import numpy as np
import pytest
import pywt
import torch
from public_helpers import small_plan

from dpsynth.errors import UsageError
from dpsynth.models.velocity import build_for, image_of
from dpsynth.models.wavelet.transform import Pyramid, Wavelet
from dpsynth.planning.schema import ImageShape, Plan
from dpsynth.public.representation import load_geometry, save_geometry, standardised
from dpsynth.public.wavelet import WaveletCodec, low_pass, wavelet_codec

CASES = [
    ("haar", 1, (8, 8, 1), None),
    ("haar", 2, (12, 8, 3), None),
    ("haar", 3, (24, 16, 1), None),
    ("haar", 2, (28, 28, 1), (32, 32)),
    ("haar", 2, (11, 9, 3), None),
    ("db2", 2, (28, 28, 1), (32, 32)),
    ("db4", 3, (30, 33, 3), None),
    ("sym4", 1, (7, 10, 1), None),
    ("coif2", 2, (8, 8, 1), None),
    ("db38", 2, (16, 16, 1), None),
    ("sym20", 5, (64, 64, 1), None),
]


def plan_of(name, levels, shape, padded):
    image = dict(zip(("height", "width", "channels"), shape, strict=True))
    space = {"kind": "wavelet", "wavelet": name, "levels": levels}
    if padded:
        space["padded"] = {"height": padded[0], "width": padded[1]}
    plan = small_plan().model_dump()
    plan["private"]["image"] = image
    return Plan.model_validate({**plan, "representation": space}, strict=False)


def codec_of(name, levels, shape, padded=None):
    plan = plan_of(name, levels, shape, padded)
    codec = wavelet_codec(plan.representation, plan.private.image)
    assert np.prod(codec.band) == plan.representation.code
    return codec


def images(count, shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def canvas(image, levels, padded):
    """An image (H, W, C) as floats, mirrored: evenly on a declared canvas, else at the end."""
    places, margins = [], []
    for side, asked in zip(image.shape[:2], padded or (None, None), strict=True):
        extra = (asked or -(-side // 2**levels) * 2**levels) - side
        before = extra // 2 if asked else 0
        margins.append((before, extra - before))
        places.append(slice(before, before + side))
    return np.pad(image.astype(float), [*margins, (0, 0)], mode="symmetric"), tuple(places)


def transform(plane, name, levels):
    """PyWavelets' own two-dimensional transform of a plane, level by level."""
    details = []
    for _ in range(levels):
        plane, detail = pywt.dwt2(plane, name, mode="periodization")
        details.append(detail)
    return plane, details


@pytest.mark.parametrize(("name", "levels", "shape", "padded"), CASES)
def test_codes_are_the_approximation_of_pywavelets(name, levels, shape, padded):
    codec = codec_of(name, levels, shape, padded)
    records = images(4, shape)
    codes = codec.encode_rows(records).reshape(4, *codec.band)
    for record, code in zip(records, codes, strict=True):
        whole, _ = canvas(record, levels, padded)
        for channel in range(shape[2]):
            expected, _ = transform(whole[..., channel], name, levels)
            # 255 2^J is the size of white's coefficients
            np.testing.assert_allclose(
                code[..., channel], expected, rtol=0, atol=1e-6 * 255 * 2**levels
            )


@pytest.mark.parametrize(("name", "levels", "shape", "padded"), CASES)
def test_decoding_is_the_inverse_with_details_of_zero(name, levels, shape, padded):
    codec = codec_of(name, levels, shape, padded)
    source = torch.Generator().manual_seed(1)
    codes = torch.randn(3, int(np.prod(codec.band)), generator=source, dtype=torch.float64)
    decoded = codec.decode(255 * codes).numpy()
    assert decoded.shape == (3, *shape)
    _, places = canvas(np.zeros(shape), levels, padded)
    for code, image in zip(codes.numpy().reshape(3, *codec.band), decoded, strict=True):
        for channel in range(shape[2]):
            plane = code[..., channel].astype(float)
            for _ in range(levels):
                plane = pywt.idwt2((plane, (None, None, None)), name, mode="periodization")
            np.testing.assert_allclose(image[..., channel], plane[places], rtol=0, atol=1e-9)


@pytest.mark.parametrize(("name", "levels", "shape"), [c[:3] for c in CASES if c[3] is None])
def test_the_code_is_the_ll0_that_the_tokenizer_sees(name, levels, shape):
    """In its units, of pixels in [0, 1]: what is drawn here can be completed there."""
    records = images(3, shape)
    whole = Wavelet(name, levels, *shape)
    expected = whole(torch.from_numpy(records).double() / 255).ll
    found = codec_of(name, levels, shape)
    codes = found.encode_many(records) / 255
    assert torch.allclose(codes.view(expected.shape), expected, rtol=0, atol=1e-6 * 2**levels)
    back = whole.inverse(Pyramid(expected, ()))
    assert torch.allclose(found.decode(255 * expected.flatten(1)), back, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("levels", "shape", "padded"), [c[1:] for c in CASES if c[0] == "haar"])
def test_haar_codes_are_whole_sums_of_squares_over_a_power_of_two(levels, shape, padded):
    codec = codec_of("haar", levels, shape, padded)
    records, side = images(5, shape), 2**levels
    codes = codec.encode_rows(records)
    for record, code in zip(records, codes, strict=True):
        whole = canvas(record, levels, padded)[0].astype(int)
        rows, columns, channels = codec.band
        squares = whole.reshape(rows, side, columns, side, channels).sum(axis=(1, 3))
        assert np.array_equal(code * side, squares.reshape(-1))  # every bit


@pytest.mark.parametrize(("name", "levels", "shape", "padded"), CASES)
def test_a_code_is_the_same_bits_in_any_company(name, levels, shape, padded, monkeypatch):
    codec = codec_of(name, levels, shape, padded)
    records = images(23, shape)
    together = codec.encode_rows(records)
    alone = np.concatenate([codec.encode_rows(record[None]) for record in records])
    assert np.array_equal(together, alone)
    order = np.random.default_rng(2).permutation(23)
    assert np.array_equal(codec.encode_rows(records[order]), together[order])
    assert np.array_equal(codec.encode_many(records).numpy(), together)
    monkeypatch.setattr("dpsynth.public.wavelet._NUMBERS", 3 * int(np.prod(shape)))
    assert np.array_equal(codec.encode_rows(np.asfortranarray(records)), together)
    # By another kernel, in another order of sums.
    first, second, worth = codec._whole_filters
    backwards = np.einsum(
        "iH,jW,nHWc->nijc",
        first[:, ::-1], second[:, ::-1], records[:, ::-1, ::-1].astype(float), optimize=False,
    )  # fmt: skip
    assert np.array_equal(backwards.reshape(23, -1) * worth, together)


def test_white_noise_and_the_extremes_stay_exact():
    """Sums at their largest are still whole numbers that float64 holds: in Python integers."""
    codec = codec_of("db4", 3, (30, 33, 3))
    first, second, worth = codec._whole_filters
    assert 255 * np.abs(first).sum(1).max() * np.abs(second).sum(1).max() < 2**53
    signs = (first[0][:, None] * second[0][None] > 0).astype(np.uint8) * 255
    record = np.repeat(signs[..., None], 3, axis=2)
    whole = [[int(v) for v in row] for row in (first[0], second[0])]
    exact = sum(
        a * b * int(record[i, j, 0]) for i, a in enumerate(whole[0]) for j, b in enumerate(whole[1])
    )
    assert codec.encode_rows(record[None])[0, 0] == float(exact) * worth


@pytest.mark.parametrize("name", ["haar", "db3", "sym5", "coif1"])
def test_round_trip_and_energy(name):
    codec = codec_of(name, 2, (16, 20, 3))
    codes = torch.randn(6, 60, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    pixels = codec.decode(255 * codes)
    # The map of codes to pixels keeps lengths, and its transpose takes them back.
    assert torch.allclose(pixels.square().sum((1, 2, 3)), codes.square().sum(1))
    back = np.einsum("hH,wW,nHWc->nhwc", codec.rows, codec.columns, pixels.numpy())
    np.testing.assert_allclose(back.reshape(6, -1), codes.numpy(), atol=1e-10)


@pytest.mark.parametrize("padded", [None, (16, 16), (20, 24)])
def test_images_of_constant_squares_survive_whole(padded):
    """Haar loses nothing of what it can show, where padding mirrors into the same square."""
    shape = (16, 16, 1) if padded is None else (12, 12, 1)
    codec = codec_of("haar", 2, shape, padded)
    before = [(side - shape[0]) // 2 for side in padded or (16, 16)]
    draw = np.random.default_rng(4)
    squares = draw.integers(0, 256, codec.band, dtype=np.uint8).repeat(4, 0).repeat(4, 1)
    record = squares[before[0] : before[0] + shape[0], before[1] : before[1] + shape[1]]
    space = standardised(codec, images(50, shape))
    if padded != (20, 24):
        assert np.array_equal(space.decode(space.encode(record[None])), record[None])
        return
    middle = (slice(None), slice(4, 8), slice(2, 10))  # whole blocks of the canvas
    decoded = space.decode(space.encode(record[None]))
    assert np.array_equal(decoded[middle], record[None][middle])


def test_what_is_kept_is_the_codec_to_the_bit(tmp_path):
    plan = plan_of("db2", 2, (28, 28, 1), (32, 32))
    codec = wavelet_codec(plan.representation, plan.private.image)
    space = standardised(codec, images(40, (28, 28, 1)), radius=2.0)
    path = tmp_path / "geometry.safetensors"
    save_geometry(path, space, {"recipe": "x", "kind": "wavelet"})
    back, _ = load_geometry(path, plan)
    assert isinstance(back.codec, WaveletCodec)
    records = images(9, (28, 28, 1), seed=5)
    assert np.array_equal(back.encode_exact_many(records), space.encode_exact_many(records))
    assert np.array_equal(back.decode(back.encode(records)), space.decode(space.encode(records)))
    others = [
        plan_of("db2", 1, (28, 28, 1), (32, 32)),
        plan_of("db2", 2, (28, 28, 1), None),
        small_plan("pixels", code=64),
        small_plan("pca", code=64),
    ]
    for other in others:
        with pytest.raises(UsageError, match="does not fit"):
            load_geometry(path, other)


def test_filters_are_orthonormal():
    for name in ("haar", "db38", "sym20", "coif17"):
        filters = low_pass(name, 32, 3)
        np.testing.assert_allclose(filters @ filters.T, np.eye(4), atol=1e-6)


def test_the_backbone_cuts_the_band_into_squares():
    plan = plan_of("haar", 2, (28, 28, 3), (32, 32))
    velocity = {"kind": "mmdit", "width": 8, "depth": 1, "heads": 2, "patch": 4}
    plan = Plan.model_validate({**plan.model_dump(), "velocity": velocity}, strict=False)
    assert image_of(plan) == ImageShape(height=8, width=8, channels=3)
    model = build_for(plan)
    assert (model.patches.tokens, model.patches.size) == (4, 48)
    x = torch.randn(2, 192)
    assert model(x, torch.rand(2), torch.tensor([0, 1])).shape == x.shape
