"""Plans of `kind: wavelet`: the code follows from image and levels; every fault names its line."""

import math

import pytest
import pywt
from plan_texts import SMALL, changed

from dpsynth.errors import PlanError
from dpsynth.planning.schema import Plan
from dpsynth.planning.wavelets import WAVELETS, Canvas, band_of, canvas_of
from dpsynth.planning.yaml_plan import parse_plan

FLOWING = "{kind: wavelet, wavelet: haar, levels: 1}"
WAVY = changed("{kind: pca, code: 4}", FLOWING)


def of(representation: str, image: str = "{height: 8, width: 8}") -> str:
    text = changed("{kind: pca, code: 4}", representation)
    return changed("{height: 8, width: 8}", image, text)


def test_the_names_are_the_orthonormal_ones_of_pywavelets() -> None:
    families = ("haar", "db", "sym", "coif")
    assert set(WAVELETS) == {name for family in families for name in pywt.wavelist(family)}
    assert all(pywt.Wavelet(name).orthogonal for name in WAVELETS)
    others = {n for n in pywt.wavelist(kind="discrete") if pywt.Wavelet(n).orthogonal}
    assert others - set(WAVELETS) == {"dmey"}


@pytest.mark.parametrize(
    ("image", "space", "code"),
    [
        ("{height: 8, width: 8}", FLOWING, 16),
        ("{height: 8, width: 12, channels: 3}", FLOWING, 72),
        ("{height: 7, width: 5}", FLOWING, 12),  # rounded up to 8 x 6
        ("{height: 28, width: 28}", "{kind: wavelet, wavelet: sym4, levels: 2}", 49),
        (
            "{height: 28, width: 28}",
            "{kind: wavelet, wavelet: db2, levels: 2, padded: {height: 32, width: 32}}",
            64,
        ),
    ],
)
def test_the_code_follows_from_image_and_levels(image: str, space: str, code: int) -> None:
    plan = parse_plan(of(space, image))
    assert plan.representation.code == code
    said = parse_plan(of(space[:-1] + f", code: {code}}}", image))
    assert said.facts() == plan.facts()
    assert Plan.of_facts(plan.facts()).representation == plan.representation
    for wrong in (code - 1, code + 1):
        with pytest.raises(PlanError, match=f"= {code} numbers"):
            parse_plan(of(space[:-1] + f", code: {wrong}}}", image))


def test_older_plans_know_nothing_of_it() -> None:
    assert set(parse_plan(SMALL).facts()["representation"]) == {
        "kind", "code", "clip_quantile", "autoencoder",
    }  # fmt: skip
    facts = parse_plan(WAVY).facts()["representation"]
    assert (facts["wavelet"], facts["levels"]) == ("haar", 1)
    assert "padded" not in facts


@pytest.mark.parametrize(
    ("space", "message", "hint"),
    [
        ("{kind: wavelet}", "needs the key `wavelet`", "wavelet: haar, levels: 2"),
        ("{kind: wavelet, wavelet: haar}", "needs the key `levels`", "wavelet: haar, levels: 2"),
        ("{kind: wavelet, wavelet: har, levels: 1}", '"har" is not known', "`wavelet: haar`?"),
        ("{kind: wavelet, wavelet: dmey, levels: 1}", "haar, db1 to db38", "wavelet: "),
        ("{kind: wavelet, wavelet: bior2.2, levels: 1}", "orthonormal", "wavelet: "),
        ("{kind: wavelet, wavelet: haar, levels: 3}", "leaves 1 x 1 of", "`levels: 2` or less"),
        ("{kind: wavelet, wavelet: haar, levels: 0}", "at least 1", "levels"),
        ("{kind: wavelet, wavelet: haar, levels: 9}", "at most 8", "levels"),
        ("{kind: wavelet, wavelet: haar, levels: two}", "a whole number", "levels"),
        ("{kind: wavelet, wavelet: haar, level: 2}", "unknown key", "`levels:`"),
        ("{kind: wavelet, wavelet: 3, levels: 1}", "expected text", "wavelet"),
        ("{kind: wavelt, wavelet: haar, levels: 1}", "'wavelet'", "`kind: wavelet`?"),
        ("{kind: pixels, wavelet: haar, levels: 1}", "only for `kind: wavelet`", "leave these"),
        ("{kind: pca, code: 4, levels: 1}", "levels: only for `kind: wavelet`", "leave these"),
        (
            "{kind: wavelet, wavelet: haar, levels: 2, padded: {height: 10, width: 8}}",
            "padded.height is 10; expected a multiple of 2^levels = 4 from 8 to 16",
            "`height: 8`",
        ),
        (
            "{kind: wavelet, wavelet: haar, levels: 2, padded: {height: 8, width: 20}}",
            "padded.width is 20",
            "`width: 8`",
        ),
        (
            "{kind: wavelet, wavelet: haar, levels: 2, padded: {height: 8, width: 4}}",
            "padded.width is 4",
            "`width: 8`",
        ),
        ("{kind: wavelet, wavelet: haar, levels: 2, padded: 12}", "got 12", "padded"),
        (
            "{kind: wavelet, wavelet: haar, levels: 2, padded: {height: 8}}",
            "lacks the key `width`",
            "width",
        ),
    ],
)
def test_faults_name_their_line_and_what_to_type(space: str, message: str, hint: str) -> None:
    text = of(space)
    line = text[: text.index(space)].count("\n") + 1
    with pytest.raises(PlanError) as caught:
        parse_plan(text)
    assert caught.value.message.startswith(f"plan.yaml:{line}: "), caught.value.message
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_images_too_small_for_any_level_are_sent_to_pixels() -> None:
    with pytest.raises(PlanError) as caught:
        parse_plan(of(FLOWING, "{height: 8, width: 2}"))
    assert "leaves 4 x 1 of an image of 8 x 2" in caught.value.message
    assert "kind: pixels" in caught.value.hint


@pytest.mark.parametrize("image", ["{height: tall, width: 8}", "{height: 8}"])
def test_faults_of_the_image_are_found_first(image: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse_plan(of(FLOWING, image))
    assert "image" in caught.value.message
    assert "code" not in caught.value.message


def test_sides_of_the_band() -> None:
    for side in range(1, 70):
        for levels in range(1, 5):
            canvas = canvas_of(side, side, levels, None)[0]
            assert canvas == math.ceil(side / 2**levels) * 2**levels
            assert band_of(side, side, levels, None) == (canvas // 2**levels,) * 2
    assert band_of(9, 8, 2, Canvas(height=16, width=8)) == (4, 2)
