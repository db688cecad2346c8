"""What lies in a hand-out folder, in plain words: its files, and how its images were made."""

import re
from collections.abc import Callable, Iterator
from typing import Any

from dpsynth.artifacts.adapter import CONFIG, DIFFUSERS, FOLDER, PEFT
from dpsynth.artifacts.cells import MOST_LLOYD, lloyd_name
from dpsynth.artifacts.votes import MOST_ROUNDS, population_name, votes_name
from dpsynth.errors import DataError

FILES = {
    "moments.safetensors": "noisy counts, sums and second moments of codes by class",
    "cross-moments.safetensors": "noisy moments of codes and caption features together",
    **{
        lloyd_name(number): f"noisy counts and sums by cell, round {number} of moving the centres"
        for number in range(1, MOST_LLOYD + 1)
    },
    "cells.safetensors": "noisy counts, sums and second moments by cell inside each class",
    **{
        votes_name(number): f"noisy votes for the members of population {number - 1}"
        for number in range(1, MOST_ROUNDS + 1)
    },
    "central.safetensors": "noisy sums of codes by class over random subsets of the records",
    "embedding.safetensors": "noisy counts, and sums of features, by class",
    "confusion.safetensors": "noisy confusion matrix of a probe on held-out private records",
    "evaluation.json": "accuracy, and recall and precision by class, from that matrix",
    "confusion.png": "that matrix as a picture",
    "mixture.safetensors": "Gaussian mixture of each class, estimated from those moments",
    "distilled.safetensors": "velocity model taught from those moments and public data",
    population_name(0): "first population of the public generator, of codes",
    **{
        population_name(number): f"population that follows from vote round {number}"
        for number in range(1, MOST_ROUNDS + 1)
    },
    "warm.safetensors": "velocity model after the central images, where DP-SGD starts",
    "generator.safetensors": "network that draws images, fitted to that embedding",
    "model.safetensors": "model after DP-SGD on the private records",
    f"{FOLDER}/{CONFIG}": "LoRA factors of that model, for `peft.PeftModel.from_pretrained`",
    f"{FOLDER}/{PEFT}": "the numbers of those factors",
    f"{FOLDER}/{DIFFUSERS}": "the same for `load_lora_weights` of a diffusers pipeline",
    "public/geometry.safetensors": "public encoder and decoder between images and codes",
    "public/within.safetensors": "how public codes spread inside their classes",
    "public/projection.safetensors": "public basis in which the moments were released",
    "public/features.safetensors": "public features of captions: centre, clip radius",
    "public/tokenizer.safetensors": "public encoder and decoder between images and tokens",
    "public/vote-features.safetensors": "public network by whose features records vote",
    "public/feature-map.safetensors": "public recipe of the features that were added up",
    "public/transformer.safetensors": "public model of tokens, which completes the fine detail",
    "coarse/tokens.safetensors": "tokens of the coarse images, from which they are completed",
    "public/calibration.json": "public calibrations: clip radii, tau, start of guidance, tokens",
    "evaluation-public.json": "measures of the samples against a public reference",
    "evaluation-public.png": "samples beside images of that public reference",
    "contact-sheet.png": "synthetic images of every class",
    "contact-sheet-plain.png": "the same without augmentation",
    "contact-sheet-coarse.png": "coarse images, before the public transformer completed them",
}

_MARKS = re.compile(r"([!-/:-@\[-`{-~])")  # ASCII punctuation: what a backslash makes literal


def literal(text: str) -> str:
    r"""Any text as one line of Markdown that shows it as it is: names are not to be trusted.

    >>> print(literal("a*b " + chr(10) + "# y"))
    a\*b \# y
    """
    return _MARKS.sub(r"\\\1", " ".join(text.split()))


def drawn(folder: str, summary: dict[str, Any]) -> str:
    """One line on a folder of samples."""
    try:
        count, how = int(summary["count"]), ", ".join(_how_made(summary.get("origin", {})))
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        raise DataError(
            f"{folder}.json is damaged: its origin or its count is none that a sampler writes",
            hint="remove it, then dpsynth sample RUN",
        ) from error
    return f"- `{folder}/`: {count:,} {'image' if count == 1 else 'images'} ({how})."


def _how_made(origin: dict[str, Any]) -> Iterator[str]:
    """What samples were drawn from, and how the decoded images were finished."""
    if origin.get("port") == "complete-wavelet":
        yield from _how_completed(origin)
        return
    shown: dict[str, Callable[[Any], object]]
    shown = {"model": literal, "steps": int, "guidance": float, "temperature": float, "top_k": int}
    yield from (f"{key} {read(origin[key])}" for key, read in shown.items() if key in origin)
    if origin.get("port") == "guide":
        begun = f"started at t0 {origin['start']:g}"
        if "mean" in origin:
            mean = literal(origin["mean"])
            yield f"{begun}: a control, with {mean} means in the place of the released ones"
        else:
            yield f"{begun} from the released moments: the sampling port"
    if "sharpen" in origin:
        yield f"sharpened by an unsharp mask of gain {origin['sharpen']:.3g}"
    if "augment" in origin:
        how = origin["augment"]
        yield (
            f"augmented: each image turned by up to {how['rotation']:g} degrees, scaled by up to "
            f"{how['scale']:.3g} of its size and shifted by up to {how['shift']:.3g} of its side"
        )


def _how_completed(origin: dict[str, Any]) -> Iterator[str]:
    """What coarse images were completed, and by what."""
    if origin["source"] == "own":
        yield from (f"coarse: {said}" for said in _how_made(origin["coarse"]))
    else:
        yield (
            "coarse: images given from elsewhere, for which nothing here vouches: the guarantee "
            "covers them only if it covered them there"
        )
    yield "detail drawn by the public transformer, which no private record has touched"
    yield f"guidance {float(origin['guidance'])}"
    yield f"temperature {float(origin['temperature'])}"
