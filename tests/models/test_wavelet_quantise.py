"""Codebooks: the nearest entry, learnt by the library and used without it."""

import math

import pytest
import torch
from torch.nn import functional

from dpsynth.errors import UsageError
from dpsynth.models.seeding import generator, seeded_initialisation
from dpsynth.models.wavelet.quantise import Codebook, Learner, Use


def cloud(count=400, clusters=8, dim=3, seed=0):
    """Latents (1, count, dim) around directions, some far more often than others."""
    source = generator(seed)
    centres = torch.randn(clusters, dim, generator=source)
    rates = torch.arange(1.0, clusters + 1) ** -2
    chosen = torch.multinomial(rates, count, replacement=True, generator=source)
    return (centres[chosen] + 0.05 * torch.randn(count, dim, generator=source))[None]


def learnt(latents, size=8, steps=30, dead=0.1):
    with seeded_initialisation(0):
        codebook = Codebook(size, latents.shape[-1])
        learner = Learner(codebook, decay=0.8, dead=dead, tokens=latents.shape[1]).train()
        for _ in range(steps):
            quantised = learner(latents)
    learner.settle()
    return codebook, learner.eval(), quantised


def test_the_nearest_entry_by_angle():
    with seeded_initialisation(0):
        codebook = Codebook(9, 4)
    latents = torch.randn(5, 6, 4, generator=generator(0))
    near = functional.cosine_similarity(latents[:, :, None], codebook.entries, dim=-1)
    ids = codebook.ids(latents)
    assert torch.equal(ids, near.argmax(-1))
    assert torch.equal(codebook.ids(codebook.latents(ids)), ids)
    assert torch.equal(codebook.latents(ids)[2, 3], codebook.entries[ids[2, 3]])
    with pytest.raises(UsageError, match="expected 0 to 8"):
        codebook.latents(torch.tensor([9]))
    with pytest.raises(UsageError, match="2 or more"):
        Codebook(1, 4)


def test_a_settled_codebook_says_what_the_library_says():
    latents = cloud()
    codebook, learner, _ = learnt(latents)
    expected = learner(latents)
    ids = codebook.ids(latents)
    assert torch.equal(ids, expected.ids)
    torch.testing.assert_close(codebook.latents(ids), expected.latents)
    near = functional.cosine_similarity(latents, codebook.latents(ids), dim=-1)
    assert float(near.mean()) > 0.95


def test_entries_that_nothing_uses_come_back():
    """All entries but one start where no latent is."""
    latents = cloud()
    size = 8
    kept = {}
    for dead in (0.0, 0.1):
        with seeded_initialisation(0):
            codebook = Codebook(size, 3)
            learner = Learner(codebook, decay=0.8, dead=dead, tokens=400).train()
            learner(latents)  # the start by k-means
            far = -functional.normalize(latents.mean(1), dim=-1)
            entries = far.repeat(size, 1) + 1e-3 * torch.randn(size, 3)
            entries[0] = -far[0]
            learner.inner._codebook.embed.data.copy_(functional.normalize(entries, dim=-1))
            learner.inner._codebook.embed_avg.data.copy_(learner.inner._codebook.embed)
            for _ in range(40):
                learner(latents)
        learner.settle()
        kept[dead] = Use.of(codebook.ids(latents), size).share
    assert kept[0.1] == 1.0
    assert kept[0.0] < 1.0


def test_gradients_pass_and_commitment_pulls_to_the_entry():
    codebook, learner, _ = learnt(cloud())
    learner.train()
    latents = cloud(seed=0).clone().requires_grad_()
    quantised = learner(latents)
    quantised.latents.sum().backward(retain_graph=True)
    assert latents.grad.abs().sum() > 0
    assert float(quantised.commitment.detach()) >= 0
    assert not list(codebook.parameters())


def test_use_by_hand():
    ids = torch.tensor([[0, 0, 3], [0, 2, 3]])
    use = Use.of(ids, 5)
    assert use.share == 0.6
    rates = [1 / 2, 1 / 6, 1 / 3]
    assert use.perplexity == pytest.approx(math.exp(-sum(p * math.log(p) for p in rates)))
    assert Use.of(torch.zeros(4, dtype=torch.int64), 5).perplexity == 1.0


def test_a_batch_smaller_than_the_codebook_fills_it_in_time(capfd):
    with seeded_initialisation(0):
        codebook = Codebook(64, 3)
        learner = Learner(codebook, decay=0.8, dead=0.1, tokens=40).train()
        for step in range(60):
            learner(cloud(40, seed=step))
    learner.settle()
    assert Use.of(codebook.ids(torch.cat([cloud(40, seed=s) for s in range(60)])), 64).share > 0.8
    assert capfd.readouterr() == ("", "")
