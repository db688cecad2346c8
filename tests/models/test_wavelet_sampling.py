"""Sampling of spectral tokens: the cache against plain passes, the distribution, guidance."""

import pytest
import torch

from dpsynth.errors import UsageError
from dpsynth.models import text as captions
from dpsynth.models.seeding import generator, seeded_initialisation
from dpsynth.models.wavelet.autoregressive import Autoregressive
from dpsynth.models.wavelet.causal import Sizes
from dpsynth.models.wavelet.sampling import Drawing, Reader, pick, sample
from dpsynth.planning.velocity import TextStream

TOKENS, CODES, COARSE = 8, 5, 3
STREAM = TextStream(width=6, length=3, vocabulary=32)
KINDS = {
    "coarse and fine": {"coarse": COARSE},
    "raster order": {},
    "one coarse token": {"coarse": 1},
    "two codebooks": {"coarse": 5, "approximation": 2},
}


def build(seed=0, **options):
    sizes = Sizes(TOKENS, CODES, width=8, depth=2, heads=2, text=STREAM, **options)
    with seeded_initialisation(seed):
        model = Autoregressive(sizes).double()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.5 * torch.randn_like(p))
    return model.eval()


def draw(count=3):
    ids = torch.randint(CODES, (count, TOKENS), generator=generator(1))
    text = captions.tokens(["a red fish", "dog", ""], STREAM.length, STREAM.vocabulary)
    return ids, text[torch.arange(count) % 3]


def uniform(*shape, seed=0):
    return torch.rand(*shape, generator=generator(seed), dtype=torch.float64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunks", [[1] * 7, [0, 1, 4, 2], [3, 1, 3], [7], [2, 5]], ids=str)
def test_the_cache_gives_the_logits_of_a_plain_pass(kind, chunks):
    model, (ids, text) = build(**KINDS[kind]), draw()
    whole, reader, done = model(ids, text), Reader(model, text), 0
    for count in chunks:
        found = reader.read(ids[:, done : done + count])
        done += count
        torch.testing.assert_close(found, whole[:, done], rtol=1e-12, atol=1e-12)


def test_the_cache_refuses_what_has_no_successor():
    model, (ids, text) = build(coarse=COARSE), draw()
    with pytest.raises(UsageError, match="no token follows"):
        Reader(model, text).read(ids)
    reader = Reader(model, text)
    reader.read(ids[:, :0])
    with pytest.raises(UsageError, match="no token follows"):
        reader.read(ids[:, :0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("guidance", [1.0, 0.0, 2.5])
@pytest.mark.parametrize("prefix", [0, COARSE, COARSE + 2])
def test_samples_are_those_of_plain_passes(kind, guidance, prefix):
    """Token by token without a cache, by the same coins."""
    model, (ids, text) = build(**KINDS[kind]), draw()
    drawing = Drawing(temperature=0.7, top_k=4, guidance=guidance)
    coins = uniform(3, TOKENS - prefix)
    given = None if prefix == 0 else ids[:, :prefix]
    found = sample(model, text, coins, drawing, prefix=given)
    expected, null = ids[:, :prefix], model.null(text)
    for step in range(TOKENS - prefix):
        padded = torch.cat([expected, torch.zeros(3, 1, dtype=torch.int64)], dim=1)
        free, told = (model(padded, t)[:, -1] for t in (null, text))
        token = pick(free + guidance * (told - free), coins[:, step], drawing)
        expected = torch.cat([expected, token[:, None]], dim=1)
    assert torch.equal(found, expected)


def test_an_images_tokens_hang_on_its_own_row_alone():
    model, (_, text) = build(coarse=COARSE), draw()
    coins = uniform(3, TOKENS)
    together = sample(model, text, coins, Drawing(guidance=2.0))
    for row in range(3):
        one = slice(row, row + 1)
        assert torch.equal(
            sample(model, text[one], coins[one], Drawing(guidance=2.0)), together[one]
        )


def test_coarse_samples_need_no_fine_part():
    model, (_, text) = build(coarse=COARSE), draw()
    coins = uniform(3, COARSE)
    before = sample(model, text, coins)
    with torch.no_grad():
        for p in model.fine.parameters():
            p.fill_(float("nan"))
    assert torch.equal(sample(model, text, coins), before)


def test_drawn_tokens_follow_the_models_distribution():
    """Frequencies of pairs of tokens against the product of their conditional probabilities."""
    model, count = build(coarse=1), 40_000
    text = draw(1)[1]
    found = sample(model, text.expand(count, -1), uniform(count, 2))
    seen = torch.bincount(found[:, 0] * CODES + found[:, 1], minlength=CODES**2) / count
    first = torch.arange(CODES)[:, None]
    probability = model(torch.cat([first, first], 1), text.expand(CODES, -1)).softmax(-1)
    expected = (probability[0, 0][:, None] * probability[:, 1]).flatten()
    error = (expected * (1 - expected) / count).sqrt()
    assert bool(((seen - expected).abs() <= 4.5 * error + 1e-9).all())


def test_temperature_top_k_and_the_ends_of_the_coins():
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]], dtype=torch.float64)
    many, coins = logits.expand(20_000, -1), uniform(20_000)

    def shares(drawing):
        return torch.bincount(pick(many, coins, drawing), minlength=4) / len(coins)

    torch.testing.assert_close(
        shares(Drawing(temperature=2.0)), (logits[0] / 2).softmax(0).float(), atol=0.012, rtol=0
    )
    two = torch.tensor([0.0, 1.0, 0.0, torch.e**-1]) / (1 + torch.e**-1)
    torch.testing.assert_close(shares(Drawing(top_k=2)), two, atol=0.012, rtol=0)
    assert shares(Drawing(top_k=1))[1] == 1
    assert shares(Drawing(temperature=0))[1] == 1
    assert shares(Drawing(top_k=99)).min() > 0
    last = torch.nextafter(torch.tensor([1.0]), torch.tensor([0.0]))
    for coin in (torch.zeros(1), last, last.double()):
        for top in (None, 2):
            token = int(pick(torch.tensor([[-1e30, 3.0, 1.0, -1e30]]), coin, Drawing(top_k=top)))
            assert token in (1, 2)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"guidance": float("inf")}, "guidance"),
    ],
)
def test_settings_that_mean_nothing_are_refused(options, match):
    with pytest.raises(UsageError, match=match):
        Drawing(**options)


def test_rows_that_do_not_belong_together_are_refused():
    model, (ids, text) = build(coarse=COARSE), draw()
    with pytest.raises(UsageError, match="rows of coins"):
        sample(model, text, uniform(2, 1))
    with pytest.raises(UsageError, match="of a model of 8"):
        sample(model, text, uniform(3, 4), prefix=ids[:, :5])
