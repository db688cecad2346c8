"""What was released of each class, as a picture: its mean, decoded by the public decoder.

Reads released moments and public files alone. Free of charge: post-processing.
"""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dpsynth.artifacts.cross import NAME as CROSS_NAME
from dpsynth.artifacts.moments import NAME as MOMENTS_NAME
from dpsynth.artifacts.moments import ReleasedMoments, load_moments
from dpsynth.artifacts.rooms import RunDir
from dpsynth.artifacts.sample_rows import Images
from dpsynth.errors import DpsynthError
from dpsynth.planning.caption_rules import condition_captions
from dpsynth.planning.captions import FreeCaptions

if TYPE_CHECKING:
    from dpsynth.planning.schema import Plan

_SMALLEST = 1e-300


def decoded_means(run: RunDir, plan: "Plan", most: int) -> tuple[dict[str, Images], list[str]]:
    """Images uint8 (H, W, C) of the released means of the first `most` classes, by class name.

    Also notes that say which means there are none of, and why; nothing here raises for a run that
    has not come so far, or an install that cannot decode.
    """
    notes: list[str] = []
    try:
        return _means(run, plan, most, notes), notes
    except ImportError:
        notes.append('Released means are not shown: decoding needs pip install -e ".[torch]".')
    except DpsynthError:  # whose message may name a folder of this machine
        notes.append("Released means could not be decoded: a file is missing, or not the run's.")
    return {}, notes


def class_means(moments: ReleasedMoments) -> NDArray[np.float64]:
    """Means (Y, d) as released: noisy sum over noisy count, pulled back into the ball of codes.

    >>> moments = ReleasedMoments(
    ...     np.array([2.0]), np.array([[6.0, 8.0]]), np.eye(2)[None], 1.0, 1.0, 1.0, 2.5, "class")
    >>> class_means(moments)
    array([[1.5, 2. ]])
    """
    means = moments.sums / np.maximum(moments.counts, 1.0)[:, None]
    norms = np.maximum(np.linalg.norm(means, axis=1, keepdims=True), _SMALLEST)
    inside: NDArray[np.float64] = means * np.minimum(1.0, moments.radius / norms)
    return inside


def _means(run: RunDir, plan: "Plan", most: int, notes: list[str]) -> dict[str, Images]:
    settings = plan.stages.moments
    if settings is None:
        notes.append("This plan releases no moments: there are no means to show.")
        return {}
    name = MOMENTS_NAME if settings.captions is None else CROSS_NAME
    if not (run.released / name).is_file():
        notes.append("No moments were released yet: there are no means to show.")
        return {}
    if settings.captions is not None:
        return _of_captions(run, plan, most, notes)
    return _of_classes(run, plan, most, notes)


def _of_classes(run: RunDir, plan: "Plan", most: int, notes: list[str]) -> dict[str, Images]:
    from dpsynth.public.projection import load_release_space

    moments, settings = load_moments(run.released / MOMENTS_NAME), plan.stages.moments
    if moments.classes < plan.private.conditions:
        notes.append("One mean was released for all records: there is none of a class.")
        return {}
    least = settings.least_count if settings else 1.0
    large = np.flatnonzero(moments.counts >= least)
    if len(large) < moments.classes:
        notes.append("A class whose noisy count is too small for a mean has none: noise hides it.")
    large = large[large < most]
    codes = load_release_space(run, plan).lift_means(class_means(moments)[large])
    names = [plan.private.classes[y] for y in large.tolist()]
    return _decoded(run, plan, names, codes)


def _of_captions(run: RunDir, plan: "Plan", most: int, notes: list[str]) -> dict[str, Images]:
    """Of a caption release: what it says of the captions that are a class's name."""
    private = plan.private
    if isinstance(private.captions, FreeCaptions):
        notes.append("Captions of this plan are free: its release has no mean of a class.")
        return {}
    captions = condition_captions(private.captions, private.classes)
    places = {name: captions.index(name) for name in private.classes[:most] if name in captions}
    if not places:
        notes.append("Captions say more than a class: the release has no mean of a class alone.")
        return {}
    from dpsynth.released.gaussians import load_mixture

    means = load_mixture(run, plan)[0].class_means[list(places.values())]
    return _decoded(run, plan, list(places), means.double().numpy())


def _decoded(
    run: RunDir, plan: "Plan", names: list[str], codes: NDArray[np.float64]
) -> dict[str, Images]:
    import torch

    from dpsynth.public.representation import load_representation

    images = load_representation(run, plan).decode(torch.from_numpy(codes))
    return dict(zip(names, images, strict=True))
