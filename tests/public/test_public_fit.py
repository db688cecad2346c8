"""Training of the autoencoder: unchanged for older plans; balanced, in half precision for new."""

from itertools import islice

import numpy as np
import pytest
import torch
from torch.nn import functional

from dpsynth.models.autoencoder import ConvAutoencoder, pixels
from dpsynth.models.seeding import batches, generator, seeded_initialisation
from dpsynth.planning.schema import Autoencoder, ImageShape, Representation
from dpsynth.public.augment import augment
from dpsynth.public.fit import _batches, autoencoder_steps, fit_autoencoder

SHAPE = ImageShape(height=8, width=8)
NEW = {"norm": True, "hidden": 16, "loss": "squares", "deform": 0.6, "precision": "bfloat16"}


def settings(**options):
    sizes = {"width": 4, "epochs": 2, "batch": 16, **options}
    return Representation(kind="autoencoder", code=5, autoencoder=Autoencoder(**sizes))


def bars(count=70, seed=0):
    draw = np.random.default_rng(seed)
    images = np.zeros((count, 8, 8, 1), dtype=np.uint8)
    for image in images:
        image[draw.integers(0, 8), :, 0] = 255
    return images


def test_older_plans_train_as_they_did():
    """Against the loop of the version before there were any of the new keys."""
    images, options = bars(), settings().autoencoder
    source = generator(3)
    with seeded_initialisation(3):
        old = ConvAutoencoder(8, 8, 1, 5, 4)
    optimiser = torch.optim.AdamW(old.parameters(), lr=2e-3, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, max_lr=2e-3, total_steps=8, pct_start=0.15
    )
    for _ in range(options.epochs):
        for index in batches(len(images), options.batch, source):
            batch = augment(pixels(torch.from_numpy(images)[index]), strokes=True, source=source)
            noise = options.latent_noise * torch.randn(len(batch), 5, generator=source)
            optimiser.zero_grad()
            functional.binary_cross_entropy_with_logits(old(batch, noise), batch).backward()
            torch.nn.utils.clip_grad_norm_(old.parameters(), 1.0)
            optimiser.step()
            schedule.step()
    drawn = np.arange(70) < 30  # without `deform` it does not matter what is drawn
    for mask in (None, drawn):
        new = fit_autoencoder(images, settings(), SHAPE, seed=3, drawn=mask)
        for name, value in old.state_dict().items():
            assert torch.equal(value, new.state_dict()[name]), name


@pytest.mark.parametrize("most", [1, 13, 40])
def test_steps_are_counted(most):
    taken = []
    fit_autoencoder(bars(), settings(), SHAPE, seed=0, steps=most, advance=lambda: taken.append(1))
    assert len(taken) == most
    assert autoencoder_steps(settings().autoencoder, 70) == 8


def test_batches_are_half_letters_however_few_there_are():
    options = settings(deform=0.6, batch=15).autoencoder
    letters = torch.arange(200) >= 190
    for index in islice(_batches(letters, options, generator(0)), 20):
        assert len(index) == 15
        assert int(letters[index].sum()) == 7
    for mask in (torch.zeros(40).bool(), torch.ones(40).bool()):
        epoch = torch.cat(list(islice(_batches(mask, options, generator(0)), 2)))
        assert len(set(epoch.tolist())) == 30  # nothing to balance: each image once


@pytest.mark.filterwarnings("ignore:TF32")
@pytest.mark.parametrize("native", [True, False])
def test_half_precision_trains_with_and_without_the_cpus_own(native):
    """Without oneDNN torch takes its plain kernels, as on a CPU that has no bfloat16."""
    images = bars(160)
    drawn = np.arange(160) % 2 == 0
    with torch.backends.mkldnn.flags(enabled=native):
        model = fit_autoencoder(
            images, settings(**NEW, learning_rate=1e-2), SHAPE, seed=0, drawn=drawn, steps=150
        )
    assert not model.training
    assert {value.dtype for value in model.parameters()} == {torch.float32}
    with torch.no_grad():
        rebuilt = model(pixels(torch.from_numpy(images))).sigmoid()
    wanted = pixels(torch.from_numpy(images))
    error = float((rebuilt - wanted).square().mean())
    assert error < 0.5 * float((wanted - wanted.mean(0)).square().mean())


def test_a_batch_of_one_cannot_be_normalised():
    with pytest.raises(ValueError, match="batch: 2 or more"):
        Autoencoder(norm=True, batch=1)
