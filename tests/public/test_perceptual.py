"""The loss in features: nothing for equal images, blind to no blur, and a better decoder by it."""

import numpy as np
import pytest
import torch

from dpsynth.errors import DataError
from dpsynth.models.autoencoder import pixels
from dpsynth.models.finish import _blur
from dpsynth.planning.schema import Autoencoder, ImageShape, Representation
from dpsynth.planning.source_kinds import GlyphsSource
from dpsynth.public import perceptual
from dpsynth.public.fit import fit_autoencoder
from dpsynth.public.perceptual import feature_loss
from dpsynth.public.sources import PublicImages, SourceFacts, _read_one

SHAPE = ImageShape(height=16, width=16)


def letters(count=600):
    (images, labels, _), *_ = _read_one(GlyphsSource(kind="glyphs", count=count), SHAPE, None)
    values, own = np.unique(labels, return_inverse=True)
    facts = SourceFacts("glyphs", count, len(values), "")
    return PublicImages(images, own.astype(np.int64), len(values), (facts,))


def wanting(weight):
    return Autoencoder(width=8, norm=True, hidden=64, loss="squares", batch=32, perceptual=weight)


@pytest.fixture(scope="module")
def trained():
    public = letters()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(perceptual, "STEPS", 150)
        return public, feature_loss(public, wanting(0.3), 0)


def test_equal_images_lose_nothing_and_blurred_ones_more_the_more_blurred(trained):
    public, loss = trained
    images = pixels(torch.from_numpy(public.images[:50]))
    assert float(loss(images, images)) == 0.0
    once = float(loss(_blur(images), images))
    assert 0.01 < once < float(loss(_blur(_blur(_blur(images))), images))


def test_only_what_was_drawn_gets_a_gradient(trained):
    public, loss = trained
    images = pixels(torch.from_numpy(public.images[:8])).requires_grad_()
    drawn = _blur(images.detach()).requires_grad_()
    loss(drawn, images).backward()
    assert drawn.grad is not None and drawn.grad.abs().sum() > 0
    assert images.grad is None
    assert all(value.grad is None for value in loss.net.parameters())


def test_a_decoder_trained_with_it_is_nearer_in_features(trained):
    public, loss = trained
    wanted = pixels(torch.from_numpy(public.images[500:]))
    found = {}
    for weight in (0.0, 1.0):
        settings = Representation(kind="autoencoder", code=16, autoencoder=wanting(weight))
        perceived = loss if weight else None
        model = fit_autoencoder(
            public.images[:500], settings, SHAPE, seed=1, steps=250, perceived=perceived
        )
        with torch.no_grad():
            found[weight] = float(loss(model(wanted).sigmoid(), wanted))
    assert found[1.0] < 0.9 * found[0.0]


def test_no_weight_trains_no_classifier_and_one_class_is_refused():
    assert feature_loss(letters(20), wanting(0.0), 0) is None
    alone = PublicImages(np.zeros((4, 16, 16, 1), np.uint8), np.zeros(4, np.int64), 1, ())
    with pytest.raises(DataError, match="at least two classes"):
        feature_loss(alone, wanting(0.3), 0)


def test_older_plans_keep_their_facts():
    assert "perceptual" not in Representation(kind="pca", code=4).autoencoder.model_fields_set
    from dpsynth.planning.facts import without_paths

    assert "perceptual" not in without_paths(wanting(0.0))
    assert without_paths(wanting(0.3))["perceptual"] == 0.3
