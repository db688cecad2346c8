"""Public pretraining of the spectral transformer: it learns, repeats itself, and is kept."""

import math

import pytest
import torch

from dpsynth.errors import UsageError
from dpsynth.models import text as captions
from dpsynth.models.seeding import generator
from dpsynth.models.wavelet.autoregressive import coarse_losses
from dpsynth.models.wavelet.causal import Sizes
from dpsynth.models.wavelet.sampling import Drawing, sample
from dpsynth.planning.training import Prior
from dpsynth.planning.velocity import TextStream
from dpsynth.public.transformer import (
    Pairs,
    fit_transformer,
    losses_by_token,
    pretrain_transformer,
)

STREAM = TextStream(width=16, length=2, vocabulary=64)
WORDS = ("fish", "dog", "tree")
TOKENS, CODES, COARSE = 8, 6, 2
SIZES = Sizes(TOKENS, CODES, COARSE, width=32, depth=2, text=STREAM)
SETTINGS = Prior(steps=160, batch=32, learning_rate=6e-3, ema=0.9, label_dropout=0.1)


def pairs(count=600, seed=0):
    """Token 0 says the word; token 1 is a coin, 0 or 1; token t >= 2 is that of t - 2, plus one."""
    source = generator(seed)
    word = torch.randint(len(WORDS), (count,), generator=source)
    ids = torch.empty(count, TOKENS, dtype=torch.int64)
    ids[:, 0], ids[:, 1] = 2 * word, torch.randint(2, (count,), generator=source)
    for t in range(2, TOKENS):
        ids[:, t] = (ids[:, t - 2] + 1) % CODES
    return Pairs(ids, captions.tokens(WORDS, STREAM.length, STREAM.vocabulary)[word]), word


@pytest.fixture(scope="module")
def fitted():
    return fit_transformer(pairs()[0], SIZES, SETTINGS, seed=0)


def test_it_learns_what_there_is_to_learn_and_no_more(fitted):
    """Entropies in nats: 0 for the word's token, log 2 for the coin, 0 for what follows."""
    found = losses_by_token(fitted.model, pairs(200, seed=9)[0])
    expected = torch.tensor([0.0, math.log(2)] + [0.0] * (TOKENS - 2), dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.08)
    first, last = fitted.losses[0], fitted.losses[-1]
    assert first == pytest.approx((math.log(CODES),) * 2, rel=1e-4)
    assert len(fitted.losses) == SETTINGS.steps
    assert last[1] < 0.3 < last[0] < 0.9


def test_samples_follow_the_caption_and_completion_follows_the_coarse_tokens(fitted):
    held, word = pairs(200, seed=9)
    coins = torch.rand(200, TOKENS, generator=generator(2), dtype=torch.float64)
    drawn = sample(fitted.model, held.text, coins, Drawing(guidance=1.5))
    assert float((drawn[:, 0] == 2 * word).double().mean()) > 0.97
    completed = sample(fitted.model, held.text, coins[:, COARSE:], prefix=held.ids[:, :COARSE])
    assert float((completed == held.ids).double().mean()) > 0.95
    # Without a caption all words come: captions were dropped in training.
    free = sample(fitted.model, held.text, coins, Drawing(guidance=0.0))
    assert {0, 2, 4} <= set(free[:, 0].tolist())


def test_the_same_seed_gives_the_same_weights_and_steps_are_counted():
    short = SETTINGS.model_copy(update={"steps": 3})
    data, seen = pairs(60)[0], []
    runs = [
        fit_transformer(data, SIZES, short, seed=seed, advance=lambda: seen.append(1))
        for seed in (1, 1, 2)
    ]
    one, same, other = (torch.cat([p.flatten() for p in r.model.parameters()]) for r in runs)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert len(seen) == 9
    assert not any(p.requires_grad for p in runs[0].model.parameters())


def test_the_average_is_that_of_the_weights():
    """At decay 0 the average is the model itself; one step's worth of it is known."""
    data = pairs(60)[0]
    steps = [SETTINGS.model_copy(update={"steps": 1, "ema": ema}) for ema in (0.0, 0.9)]
    raw, young = (fit_transformer(data, SIZES, s, seed=1).model for s in steps)
    start = fit_transformer(
        data, SIZES, SETTINGS.model_copy(update={"steps": 1, "learning_rate": 1e-30}), seed=1
    ).model
    for a, b, c in zip(raw.parameters(), young.parameters(), start.parameters(), strict=True):
        # The first decay is min(ema, 1 / 10).
        torch.testing.assert_close(b, 0.9 * a + 0.1 * c, rtol=1e-4, atol=1e-6)


def test_raster_order_learns_with_one_set_of_weights():
    sizes = Sizes(TOKENS, CODES, width=32, depth=2, text=STREAM)
    found = fit_transformer(pairs()[0], sizes, SETTINGS, seed=0)
    assert len(found.losses[0]) == 1
    held = pairs(100, seed=9)[0]
    loss = coarse_losses(found.model, held.ids, held.text).mean()
    assert float(loss.detach()) == pytest.approx(math.log(2) / TOKENS, abs=0.06)


def test_the_file_is_kept_for_the_recipe_and_made_again_for_another(tmp_path, capsys):
    path, short = tmp_path / "transformer.safetensors", SETTINGS.model_copy(update={"steps": 4})
    data = pairs(60)[0]

    def made(recipe):
        return pretrain_transformer(path, data, SIZES, short, seed=0, recipe=recipe)

    first, stamp = made("a"), path.read_bytes()
    assert "nats" in capsys.readouterr().err
    again = made("a")
    assert "kept" in capsys.readouterr().err
    assert path.read_bytes() == stamp
    assert torch.equal(first(data.ids, data.text), again(data.ids, data.text))
    made("b")
    assert b'"room":"public"' in path.read_bytes()
    assert path.read_bytes() != stamp


@pytest.mark.parametrize(
    ("ids", "text", "match"),
    [
        (torch.zeros(3, 5, dtype=torch.int64), torch.zeros(3, 2), "expected"),
        (torch.full((3, TOKENS), CODES), torch.zeros(3, 2), "outside a codebook"),
        (torch.zeros(3, TOKENS, dtype=torch.int64), torch.zeros(2, 2), "2 captions"),
    ],
)
def test_pairs_that_do_not_fit_are_refused(ids, text, match):
    with pytest.raises(UsageError, match=match):
        fit_transformer(Pairs(ids, text), SIZES, SETTINGS, seed=0)
