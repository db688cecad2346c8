"""Which token is which piece: against loops, and back again."""

import pytest
import torch

from dpsynth.errors import UsageError
from dpsynth.models.seeding import generator
from dpsynth.models.wavelet.layout import even_patches, layout_of
from dpsynth.models.wavelet.transform import Wavelet
from dpsynth.planning.tokens import Tokens

SHAPES = [
    ("haar", 2, 28, 28, 1, (2, 3, 7)),
    ("db2", 3, 20, 30, 3, (2, 1, 4, 5)),
    ("haar", 0, 10, 7, 3, (4,)),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_lie_coarse_to_fine_band_by_band_row_by_row(shape):
    *about, patches = shape
    wavelet = Wavelet(*about)
    layout = layout_of(wavelet, patches)
    pyramid = wavelet(torch.rand(2, *wavelet.shape, generator=generator(0)))
    found = layout.patches(pyramid)
    place = 0
    for s, (part, p) in enumerate(
        zip([pyramid.ll[:, None], *pyramid.details], patches, strict=True)
    ):
        _, bands, height, width, channels = part.shape
        token = 0
        for band in range(bands):
            for top in range(0, height, p):
                for left in range(0, width, p):
                    piece = torch.zeros(2, p, p, channels)
                    cut = part[:, band, top : top + p, left : left + p]
                    piece[:, : cut.shape[1], : cut.shape[2]] = cut
                    assert torch.equal(found[s][:, token], piece.flatten(1))
                    assert int(layout.scale[place]) == s
                    assert int(layout.band[place]) == (band + 1 if s else 0)
                    token, place = token + 1, place + 1
        assert token == layout.scales[s].tokens
        assert layout.coarse(s) == place
        assert layout.last(place) == s
        assert layout.scales[s].coefficients == part[0].numel()
    assert layout.tokens == place == len(layout.scale) == len(layout.band)


@pytest.mark.parametrize("shape", SHAPES)
def test_patches_come_back(shape):
    *about, patches = shape
    wavelet = Wavelet(*about)
    layout = layout_of(wavelet, patches)
    pyramid = wavelet(torch.rand(2, *wavelet.shape, generator=generator(0)))
    for scale in range(len(patches)):
        part = pyramid.upto(scale)
        back = layout.pyramid(layout.patches(part))
        assert torch.equal(back.ll, part.ll)
        assert len(back.details) == scale
        assert all(map(torch.equal, back.details, part.details))


def test_only_whole_scales_are_a_prefix():
    layout = layout_of(Wavelet("haar", 2, 8, 8, 1), (1, 1, 2))
    assert [layout.coarse(s) for s in range(3)] == [4, 16, 28]
    assert [part.shape[1] for part in layout.split(torch.zeros(3, 16))] == [4, 12]
    with pytest.raises(UsageError, match="inside a scale") as error:
        layout.split(torch.zeros(3, 5))
    assert error.value.hint == "give whole scales: 4, 16, 28 tokens"
    with pytest.raises(UsageError, match="scale 3"):
        layout.coarse(3)


@pytest.mark.parametrize("levels", [0, 1, 3])
@pytest.mark.parametrize("image", [(8, 8, 1), (28, 28, 1), (33, 18, 3), (64, 64, 3)])
def test_a_plan_counts_tokens_as_they_are(levels, image):
    tokens = Tokens(levels=levels)
    height, width, _ = image
    layout = layout_of(Wavelet("haar", levels, *image), tokens.patches(height, width))
    assert tokens.counts(height, width) == tuple(scale.tokens for scale in layout.scales)
    for scale, part in enumerate(layout.scales):
        assert tokens.band(height, width, scale) == (part.height, part.width)


def test_patches_as_many_as_scales():
    wavelet = Wavelet("haar", 2, 28, 28, 1)
    assert even_patches(wavelet) == (2, 2, 4)
    assert even_patches(wavelet, 7, 2) == (1, 4, 7)
    for wrong in [(1, 1), (1, 1, 0), (1, 1, 1, 1)]:
        with pytest.raises(UsageError, match="levels"):
            layout_of(wavelet, wrong)
