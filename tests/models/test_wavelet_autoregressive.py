"""The spectral transformer: what each token's logits hang on, captions, codebooks, files."""

import math

import pytest
import torch
from torch.nn import functional

from dpsynth.errors import UsageError
from dpsynth.models import text as captions
from dpsynth.models.seeding import generator, seeded_initialisation
from dpsynth.models.wavelet.autoregressive import (
    Autoregressive,
    coarse_losses,
    drop_captions,
    load_transformer,
    save_transformer,
    token_losses,
)
from dpsynth.models.wavelet.causal import Sizes
from dpsynth.planning.velocity import TextStream

TOKENS, CODES, COARSE = 9, 7, 4
STREAM = TextStream(width=6, length=3, vocabulary=32)
KINDS = {
    "coarse and fine": {"coarse": COARSE},
    "raster order": {},
    "one coarse token": {"coarse": 1},
    "two codebooks, split at j0": {"coarse": COARSE, "approximation": COARSE},
    "two codebooks, split inside the coarse": {"coarse": COARSE, "approximation": 2},
    "two codebooks, split inside the fine": {"coarse": COARSE, "approximation": 6},
    "two codebooks, one part": {"approximation": 2},
}


def sizes(**options):
    given = {"width": 8, "depth": 2, "heads": 2, "text": STREAM, **options}
    return Sizes(TOKENS, CODES, **given)


def build(seed=0, **options):
    with seeded_initialisation(seed):
        model = Autoregressive(sizes(**options)).double()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.3 * torch.randn_like(p))
    return model.eval()


def draw(count=3, seed=1):
    ids = torch.randint(CODES, (count, TOKENS), generator=generator(seed))
    text = captions.tokens(["a red fish", "dog", ""][:count], STREAM.length, STREAM.vocabulary)
    return ids, text


def by_hand(model, ids, text):
    """Logits (T, K) of one image, place by place and head by head, in plain loops."""
    model_parts, found = model.parts, []
    heads = model.coarse.layers[0].heads
    memory = [[] for _ in range(model.sizes.depth)]  # (key, value) of each place, by layer
    for place in range(TOKENS):
        part = next(p for p in model_parts if p.start <= place < p.stop)
        hidden = part.position.weight[place - part.start]
        if place > 0:
            first_book = model.sizes.book(max(0, part.start - 1))
            row = ids[place - 1] + CODES * (model.sizes.book(place - 1) - first_book)
            hidden = hidden + part.enter.weight[row]
        told = [
            part.read(model.table[i]) + part.place.weight[s]
            for s, i in enumerate(text)
            if int(i) != captions.PADDING
        ]
        for layer, past in zip(part.layers, memory, strict=True):
            q, k, v = layer.mix_in(layer.norm_mix(hidden)).chunk(3)
            past.append((k, v))
            pairs = [tuple(layer.text_in(one).chunk(2)) for one in told] + past
            mixed = []
            for head in range(heads):
                own = slice(head * len(q) // heads, (head + 1) * len(q) // heads)
                scores = torch.stack([q[own] @ k[own] for k, _ in pairs]) / math.sqrt(
                    len(q) // heads
                )
                weights = scores.exp() / scores.exp().sum()
                mixed.append(sum(w * v[own] for w, (_, v) in zip(weights, pairs, strict=True)))
            hidden = hidden + layer.mix_out(torch.cat(mixed))
            inner = layer.up(layer.norm_up(hidden))
            hidden = hidden + layer.down(inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2))))
        two = model.sizes.book(place) > model.sizes.book(part.start)
        found.append(part.heads[int(two)](part.norm(hidden)))
    return torch.stack(found)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_plain_loops(kind):
    model, (ids, text) = build(**KINDS[kind]), draw()
    found = model(ids, text)
    assert found.shape == (3, TOKENS, CODES)
    for row in range(3):
        expected = by_hand(model, ids[row], text[row])
        torch.testing.assert_close(found[row], expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_hangs_on_those_before_it_alone(kind):
    model, (ids, text) = build(**KINDS[kind]), draw()
    first = model(ids, text)
    for place in range(TOKENS):
        other = ids.clone()
        other[:, place] = (other[:, place] + 1) % CODES
        moved = (model(other, text) - first).abs().amax((0, 2)) > 0
        assert moved.tolist() == [False] * (place + 1) + [True] * (TOKENS - place - 1)
        short = model(ids[:, : place + 1], text)
        torch.testing.assert_close(short, first[:, : place + 1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [k for k in KINDS if "coarse" in KINDS[k]])
def test_coarse_logits_do_not_depend_on_fine_weights(kind):
    model, (ids, text) = build(**KINDS[kind]), draw()
    coarse = model.coarse.stop
    before = model(ids, text)
    with torch.no_grad():
        for p in model.fine.parameters():
            p.fill_(float("nan"))
    after = model(ids, text)
    assert torch.equal(after[:, :coarse], before[:, :coarse])
    assert after[:, coarse:].isnan().all()
    # No gradient either, of any weight.
    model = build(**KINDS[kind])
    loss = coarse_losses(model, ids, text).sum()
    grads = torch.autograd.grad(loss, list(model.fine.parameters()), allow_unused=True)
    assert all(g is None for g in grads)


def test_fine_logits_depend_on_coarse_weights_by_attention():
    model, (ids, text) = build(coarse=COARSE), draw()
    model(ids, text)[:, COARSE:].square().sum().backward()
    assert model.coarse.layers[0].mix_in.weight.grad.abs().sum() > 0
    assert not model.coarse.heads[0].weight.grad.any()


def test_the_coarse_loss_neither_runs_nor_reads_the_fine_part():
    model, (ids, text) = build(coarse=COARSE), draw()

    def ran(*_):
        raise AssertionError("the fine part ran")

    for layer in model.fine.modules():
        layer.register_forward_pre_hook(ran)
    loss = coarse_losses(model, ids, text)
    loss.sum().backward()
    assert all(p.grad is None for p in model.fine.parameters())
    assert all(p.grad is not None for p in model.coarse.parameters())
    other = ids.clone()
    other[:, COARSE:] = -99  # no token at all: never read
    assert torch.equal(coarse_losses(model, other, text), loss)
    assert torch.equal(coarse_losses(model, ids[:, :COARSE], text), loss)
    with pytest.raises(AssertionError, match="fine part ran"):
        model(ids, text)


def test_the_coarse_loss_is_the_cross_entropy_and_averages_a_units_images():
    model, (ids, text) = build(coarse=COARSE), draw()
    log_p = model(ids, text).detach().log_softmax(-1)
    expected = [
        -sum(float(log_p[n, t, ids[n, t]]) for t in range(COARSE)) / COARSE for n in range(3)
    ]
    torch.testing.assert_close(coarse_losses(model, ids, text).tolist(), expected)
    pair = coarse_losses(model, ids[:2][None], text[:2][None])
    torch.testing.assert_close(pair.tolist(), [sum(expected[:2]) / 2])
    raster = build()
    whole = token_losses(raster, ids, text).mean(1)
    torch.testing.assert_close(coarse_losses(raster, ids, text), whole)


def test_captions_matter_padding_does_not_and_null_is_the_empty_one():
    model, (ids, text) = build(coarse=COARSE), draw()
    found = model(ids, text)
    assert (model(ids, text.flip(0))[0] - found[0]).abs().amax(1).min() > 0
    with torch.no_grad():
        model.table[captions.PADDING] = 1e6
        for part in model.parts:
            part.place.weight[2] += 5.0  # the third place: a word of the first caption alone
    moved = (model(ids, text) - found).abs().amax((1, 2))
    assert moved[0] > 0
    assert moved[1:].max() == 0
    assert torch.equal(model.null(text), text[2].expand_as(text))


def test_numbers_of_a_frozen_encoder_are_captions_too():
    model, (ids, _) = build(coarse=COARSE), draw()
    vectors = torch.randn(3, STREAM.length, STREAM.width, generator=generator(0))
    assert model(ids, vectors).shape == (3, TOKENS, CODES)
    assert torch.equal(model.null(vectors), torch.zeros_like(vectors))
    with pytest.raises(UsageError, match="captions came as"):
        model(ids, vectors[:, :1])


def test_dropped_captions_are_the_null_one():
    text = torch.ones(4000, 3, dtype=torch.int64)
    dropped = drop_captions(text, torch.zeros_like(text), 0.25, generator(0))
    assert set(dropped.sum(1).tolist()) == {0, 3}
    assert abs(float((dropped[:, 0] == 0).double().mean()) - 0.25) < 0.03
    vectors = drop_captions(torch.ones(9, 2, 5), torch.zeros(9, 2, 5), 0.5, generator(0))
    assert 0 < float(vectors.mean()) < 1


@pytest.mark.parametrize("kind", KINDS)
def test_no_row_of_an_embedding_or_head_is_without_use(kind):
    """Unused weights would get noise and no signal: every row is reached by some token."""
    model = build(**KINDS[kind])
    ids = torch.arange(CODES)[:, None].expand(-1, TOKENS)
    text = draw(1)[1].expand(CODES, -1)
    token_losses(model, ids, text).sum().backward()
    for name, p in model.named_parameters():
        if name == "coarse.enter.weight" and KINDS[kind].get("coarse") == 1:
            continue  # one coarse token takes in nothing
        assert p.grad is not None, name
        assert bool((p.grad.flatten(1) if p.ndim > 1 else p.grad[:, None]).any(1).all()) or (
            name.endswith("in.bias")  # a key's bias changes no softmax
        ), name


@pytest.mark.parametrize("kind", KINDS)
def test_files_come_back_and_other_models_are_refused(kind, tmp_path):
    model, path = build(**KINDS[kind]).float(), tmp_path / "transformer.safetensors"
    save_transformer(model, path, room="public", recipe="r")
    again, metadata = load_transformer(path, model.sizes)
    ids, text = draw()
    assert torch.equal(again(ids, text), model(ids, text))
    assert (again.sizes, metadata["recipe"], again.training) == (model.sizes, "r", False)
    with pytest.raises(UsageError, match="the plan expects"):
        load_transformer(path, sizes(coarse=2, width=16))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"coarse": TOKENS}, "nothing to complete"),
        ({"coarse": 0}, "nothing to complete"),
        ({"approximation": TOKENS}, "codebook"),
        ({"heads": 3}, "no multiple"),
        ({"depth": 0}, "below 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options, match):
    with pytest.raises(UsageError, match=match):
        sizes(**options)


def test_shapes_that_do_not_fit_are_refused():
    model, (ids, text) = build(coarse=COARSE), draw()
    for wrong in (ids[:, :0], torch.cat([ids, ids], 1), ids[0]):
        with pytest.raises(UsageError, match="tokens came as"):
            model(wrong, text)
    with pytest.raises(UsageError, match="expected 4 coarse ones"):
        coarse_losses(model, ids[:, :3], text)
    with pytest.raises(UsageError, match="has no coarse tokens"):
        coarse_losses(torch.nn.Linear(1, 1), ids, text)


def test_uniform_at_the_start():
    """Heads start at zero: log K nats a token."""
    with seeded_initialisation(0):
        model = Autoregressive(sizes(coarse=COARSE))
    losses = token_losses(model, *draw())
    assert torch.equal(functional.relu(losses), losses)
    torch.testing.assert_close(losses, torch.full_like(losses, math.log(CODES)))
