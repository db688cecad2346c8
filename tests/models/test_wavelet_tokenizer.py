"""The spectral tokenizer: causal by scale, to the bit, on both sides."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional

from dpsynth.artifacts.tensors import save_tensors
from dpsynth.errors import MissingError, UsageError
from dpsynth.models.seeding import generator, seeded_initialisation
from dpsynth.models.wavelet.adtransformer import ADBlock, ADTransformer
from dpsynth.models.wavelet.stored import load_tokenizer, save_tokenizer
from dpsynth.models.wavelet.tokenizer import Tokenizer, TokenizerSettings
from dpsynth.models.wavelet.transform import Pyramid

SMALL = TokenizerSettings(
    14, 10, 3, levels=2, patches=(2, 3, 3), hidden=16, depth=2, heads=2, codebook=7, code=3
)


def made(settings=SMALL, seed=0):
    with seeded_initialisation(seed):
        tokenizer = Tokenizer(settings)
        tokenizer.standardise(tokenizer.wavelet(pictures(50, settings, seed=9)))
    return tokenizer.eval().requires_grad_(False)


def pictures(count, settings=SMALL, seed=0):
    shape = (settings.height, settings.width, settings.channels)
    return torch.rand(count, *shape, generator=generator(seed))


def some_ids(tokenizer, count=4, seed=1):
    size = (count, tokenizer.layout.tokens)
    return torch.randint(0, tokenizer.settings.codebook, size, generator=generator(seed))


def parts(pyramid):
    return [pyramid.ll, *pyramid.details]


@pytest.mark.parametrize("scale", [0, 1])
def test_decoding_a_prefix_does_not_depend_on_later_tokens_to_the_bit(scale):
    tokenizer = made()
    ids, end = some_ids(tokenizer), tokenizer.layout.coarse(scale)
    prefix = parts(tokenizer.decode_pyramid(ids[:, :end]))
    assert len(prefix) == scale + 1
    other = ids.clone()
    other[:, end:] = (other[:, end:] + 1) % SMALL.codebook
    for whole in (ids, other):
        full = parts(tokenizer.decode_pyramid(whole))
        assert all(map(torch.equal, full, prefix))
    # And later tokens matter where they may.
    assert not torch.equal(tokenizer.decode(ids), tokenizer.decode(other))
    image = tokenizer.wavelet.inverse(tokenizer.decode_pyramid(other).upto(scale)).clamp(0, 1)
    assert torch.equal(tokenizer.decode(ids[:, :end]), image)


def test_finer_coefficients_do_depend_on_coarser_tokens():
    tokenizer = made()
    ids = some_ids(tokenizer)
    other = ids.clone()
    other[:, 0] = (other[:, 0] + 1) % SMALL.codebook
    pairs = zip(
        parts(tokenizer.decode_pyramid(ids)), parts(tokenizer.decode_pyramid(other)), strict=True
    )
    assert not any(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("scale", [0, 1, 2])
def test_coarse_tokens_are_those_of_the_coarse_coefficients_alone(scale):
    tokenizer = made()
    pyramid = tokenizer.wavelet(pictures(20))
    end = tokenizer.layout.coarse(scale)
    ids = tokenizer.encode_pyramid(pyramid)
    changed = [part + (s > scale) * torch.randn_like(part) for s, part in enumerate(parts(pyramid))]
    moved = tokenizer.encode_pyramid(Pyramid(changed[0], tuple(changed[1:])))
    assert torch.equal(moved[:, :end], ids[:, :end])
    assert scale == 2 or not torch.equal(moved, ids)
    assert torch.equal(tokenizer.encode_pyramid(pyramid.upto(scale)), ids[:, :end])
    assert torch.equal(tokenizer.encode(pictures(20), upto=scale), ids[:, :end])
    assert len(ids.unique()) > 1


def test_a_small_picture_has_the_tokens_of_scale_0():
    tokenizer = made()
    pyramid = tokenizer.wavelet(pictures(6).double()).ll.float()
    small = tokenizer.wavelet.coarse_image(pyramid)
    ids = tokenizer.encode_coarse(small)
    assert ids.shape == (6, tokenizer.layout.coarse(0))
    assert (ids == tokenizer.encode(pictures(6), upto=0)).float().mean() > 0.95  # rounding
    assert tokenizer.decode_coarse(ids).shape == small.shape
    whole = tokenizer.decode_pyramid(tokenizer.encode(pictures(6)))
    expected = tokenizer.wavelet.coarse_image(whole.ll).clamp(0, 1)
    assert torch.equal(tokenizer.decode_coarse(tokenizer.encode(pictures(6))), expected)


def test_a_records_ids_are_the_same_bits_in_any_company():
    tokenizer = made()
    images = pictures(9)
    ids = tokenizer.encode_exact(images)
    assert torch.equal(ids, torch.cat([tokenizer.encode_exact(image[None]) for image in images]))
    assert torch.equal(ids.flip(0), tokenizer.encode_exact(images.flip(0)))
    assert (ids == tokenizer.encode(images)).float().mean() > 0.99
    assert tokenizer.encode_exact(images[:0]).shape == (0, tokenizer.layout.tokens)
    assert tokenizer.encode_exact(images[:0], upto=0).shape == (0, tokenizer.layout.coarse(0))


def test_a_block_is_masked_attention_over_all_tokens():
    """Against one masked softmax over the whole sequence, with each kind's own weights."""
    with seeded_initialisation(3):
        block = ADBlock(8, 2).double()
    sizes = [3, 4, 2]
    hidden = torch.randn(2, 9, 8, dtype=torch.float64, generator=generator(0))
    scale = torch.repeat_interleave(torch.arange(3), torch.tensor(sizes))
    kinds = [block.layer(0), block.layer(1), block.layer(2)]
    assert kinds[1] is kinds[2]
    assert kinds[0] is not kinds[1]
    asked = [kind.asked(hidden) for kind in kinds]
    query, key, value = (
        torch.stack([asked[int(s)][p][:, :, t] for t, s in enumerate(scale)], dim=2)
        for p in range(3)
    )
    weights = (query @ key.mT / 2).masked_fill(scale[None, :] > scale[:, None], -torch.inf)
    mixed = weights.softmax(-1) @ value
    found = torch.cat(block(list(hidden.split(sizes, dim=1))), dim=1)
    for t, s in enumerate(scale):
        one = kinds[int(s)].moved(hidden[:, t : t + 1], mixed[:, :, t : t + 1])
        torch.testing.assert_close(found[:, t : t + 1], one)


def test_approximation_and_details_have_parameters_of_their_own():
    """What scale 0 becomes moves no parameter of the details; theirs move only keys and values."""
    with seeded_initialisation(0):
        model = ADTransformer([2, 3], [4, 5], [3, 6], [1, 3], width=8, depth=2, heads=2)
    tokens = [torch.randn(2, 3, 2), torch.randn(2, 6, 3)]
    coarse, fine = model(tokens)
    assert (coarse.shape, fine.shape) == ((2, 3, 4), (2, 6, 5))
    coarse.square().sum().backward(retain_graph=True)
    moved = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    kinds = {name for name in moved if ".kinds." in name}
    assert kinds
    assert all(".kinds.0." in name for name in kinds)
    assert not any(name.startswith(("ins.1", "outs.1", "norms.1", "places.1")) for name in moved)
    model.zero_grad(set_to_none=True)
    fine.square().sum().backward()
    still = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    assert {name for name in still if ".kinds.1." in name} == set()
    assert {"outs.0.maps.0.weight", "blocks.1.kinds.0.mix_out.weight"} <= still


def test_standardised_coefficients_have_unit_variance_and_come_back():
    tokenizer = made()
    pyramid = tokenizer.wavelet(pictures(50, seed=9))
    patches = tokenizer._standard(pyramid)
    for s, patch in enumerate(patches):
        total = 50 * tokenizer.layout.scales[s].coefficients
        assert float(patch.square().sum()) / total == pytest.approx(1.0, rel=1e-4)
    for a, b in zip(parts(tokenizer._original(patches)), parts(pyramid), strict=True):
        torch.testing.assert_close(a, b)


def test_before_training_the_decoder_is_about_the_mean_image():
    tokenizer = made()
    images = pictures(50, seed=9)
    found = tokenizer.decode(some_ids(tokenizer, 20))
    assert functional.mse_loss(found, images.mean(0).expand_as(found)) < 0.1 * images.var()


def test_shared_codebook():
    tokenizer = made(replace(SMALL, shared=True))
    assert tokenizer.codebook(0) is tokenizer.codebook(2)
    assert made().codebook(0) is not made().codebook(1)
    assert tokenizer.decode(tokenizer.encode(pictures(2))).shape == (2, 14, 10, 3)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda ids: ids[:, :-1], "inside a scale"),
        (lambda ids: ids + 7, "expected 0 to 6"),
        (lambda ids: ids - 9, "expected 0 to 6"),
    ],
)
def test_what_cannot_be_decoded(change, why):
    tokenizer = made()
    with pytest.raises(UsageError, match=why):
        tokenizer.decode(change(some_ids(tokenizer)))


def test_heads_must_divide():
    with pytest.raises(UsageError, match="heads"):
        Tokenizer(replace(SMALL, heads=3))


def test_a_file_says_what_it_holds(tmp_path):
    tokenizer, path = made(), tmp_path / "tokenizer.safetensors"
    save_tokenizer(tokenizer, path, recipe="abc")
    read, facts = load_tokenizer(path, SMALL)
    assert (facts["recipe"], facts["room"]) == ("abc", "public")
    assert read.settings == SMALL
    ids = tokenizer.encode(pictures(3))
    assert torch.equal(read.encode(pictures(3)), ids)
    assert torch.equal(read.decode(ids), tokenizer.decode(ids))
    assert not any(p.requires_grad for p in read.parameters())
    again = tmp_path / "again.safetensors"
    save_tokenizer(read, again, recipe="abc")
    assert again.read_bytes() == path.read_bytes()


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "tokenizer.safetensors"
    with pytest.raises(MissingError):
        load_tokenizer(path)
    save_tokenizer(made(), path)
    with pytest.raises(UsageError, match="other settings"):
        load_tokenizer(path, replace(SMALL, codebook=8))
    save_tensors(path, {"a": np.zeros(1)}, {"room": "public", "format": "other"})
    with pytest.raises(UsageError, match="format"):
        load_tokenizer(path)
    about = {"room": "public", "format": "dpsynth-tokenizer-1"}
    for settings in ("", "[]", "{}", SMALL.to_text()):
        save_tensors(path, {"a": np.zeros(1)}, {**about, "settings": settings})
        with pytest.raises(UsageError, match=r"settings of a tokenizer|its own metadata"):
            load_tokenizer(path)


def test_raster_order_is_one_scale_of_the_images_own_patches():
    """Tokens lie row by row, and each sees the whole image: there is nothing coarser or finer."""
    raster = replace(SMALL, levels=0, patches=(5,))
    tokenizer, images = made(raster), pictures(3)
    layout = tokenizer.layout
    assert (layout.tokens, len(layout.scales), layout.scales[0].grid) == (6, 1, (3, 2))
    assert len(tokenizer.codebooks) == 1
    ids = tokenizer.encode(images)
    assert torch.equal(ids, tokenizer.encode(images, 0))
    assert torch.equal(ids, tokenizer.encode_exact(images))
    assert torch.equal(ids, tokenizer.encode_coarse(images))
    assert tokenizer.decode(ids).shape == images.shape
    assert torch.equal(tokenizer.decode(ids), tokenizer.decode_coarse(ids))
    patches = layout.patches(tokenizer.wavelet(images))[0]
    assert torch.equal(patches[:, 1].view(3, 5, 5, 3), images[:, :5, 5:10])
    assert torch.equal(patches[:, 2].view(3, 5, 5, 3), images[:, 5:10, :5])
    count = sum(p.numel() for p in tokenizer.parameters())
    assert count < sum(p.numel() for p in made().parameters()) / 1.5
    shared = replace(raster, shared=True)
    assert sum(p.numel() for p in made(shared).parameters()) == count
