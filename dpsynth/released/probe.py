"""The classifier of a charged evaluation: `evaluate`'s first probe, trained on released samples.

Post-processing: it is a function of `released/samples`, which the plan's sampler drew of released
files, and of public settings. What it says of a record is a function of that record alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from dpsynth.artifacts.samples import content_digest, read_samples, read_summary
from dpsynth.console import progress
from dpsynth.errors import MissingError, UsageError, typed
from dpsynth.models.lenet import LeNet, to_tensor, train_probe, training_steps
from dpsynth.models.threads import one_thread
from dpsynth.planning.verify import VerifiedPlan
from dpsynth.released.own import own_origin

SEED = 0
"""Of `assess.probes.SEEDS` the first: `evaluate` shows the mean of three."""

Answer = Callable[[NDArray[np.uint8]], int | None]


@dataclass(frozen=True)
class Probe:
    """A trained probe, and what it was trained on (see `ReleasedConfusion`)."""

    net: LeNet
    samples_sha256: str
    samples: int
    steps: int
    seed: int = SEED

    def answer(self, image: NDArray[np.uint8]) -> int | None:
        """Class of one image uint8 (H, W, C); None where the scores are not finite.

        A batch of one on one thread, whatever else is asked: in company a product's sums may round
        apart, and a record on the border of two classes would then move with its neighbours. The
        image is copied into memory that torch aligned, for kernels may go by alignment.
        """
        with one_thread(), torch.inference_mode():
            scores = self.net(to_tensor(np.array(image, order="C")[None]))[0].numpy()
        return int(scores.argmax()) if np.isfinite(scores).all() else None


def trained_probe(verified: VerifiedPlan) -> Probe:
    """Train the probe on the plan's own samples by `evaluate`'s protocol. Opens nothing private.

    Raises:
        MissingError: the samples were not drawn, or not to the end.
        DataError: they are damaged.
        UsageError: they are not what the sampler drew, or changed meanwhile; training ended with
            weights that are not finite.
    """
    plan, folder = verified.plan, verified.run.released / "samples"
    digest = _drawn_digest(verified, folder)
    image, classes = plan.private.image, plan.private.classes
    shape = (image.height, image.width, image.channels)
    images, labels = read_samples(folder, classes, shape)
    steps = training_steps(len(images), plan.evaluation.probe_epochs)
    with progress("training the probe on the samples", steps) as bar:
        net = train_probe(
            images, labels, len(classes), steps=steps, seed=SEED, progress=bar.advance
        )
    if not all(torch.isfinite(weight).all() for weight in net.state_dict().values()):
        raise UsageError(
            "the probe did not learn: its weights are not finite",
            hint="look at released/contact-sheet.png; nothing was charged",
        )
    if content_digest(folder) != digest:
        raise _not_drawn(verified, "the samples changed while the probe learned from them")
    return Probe(net, digest, len(images), steps)


def _drawn_digest(verified: VerifiedPlan, folder: Path) -> str:
    """Digest of the samples, if they are what the plan's sampler drew of what is released.

    The composition rests on that: the probe must be a function of earlier outputs. A forger who
    writes a summary to match is not found out (docs/maths/evaluation.md, V1).
    """
    summary = read_summary(folder)
    if summary is None:
        raise MissingError(
            "the samples come first: the classifier learns from them alone",
            hint=typed("dpsynth", _sampler(verified), verified.run.root),
        )
    digest = summary.get("content_sha256")
    if not isinstance(digest, str):
        raise _not_drawn(verified, "the samples come from a version that kept no digest of them")
    if summary.get("origin") != own_origin(verified, summary.get("count", 0)):
        raise _not_drawn(verified, "the samples are not the plan's own, or of other files than now")
    if content_digest(folder) != digest:
        raise _not_drawn(verified, "the samples are not those that were drawn: a file changed")
    return digest


def _not_drawn(verified: VerifiedPlan, why: str) -> UsageError:
    return UsageError(
        f"{why}; nothing was charged",
        hint="remove released/samples.json, then "
        + typed("dpsynth", _sampler(verified), verified.run.root),
    )


def _sampler(verified: VerifiedPlan) -> str:
    """The command that writes the plan's samples."""
    return "complete-wavelet" if verified.plan.is_completed else "sample"
