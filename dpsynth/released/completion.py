"""`complete-wavelet`: fine detail for coarse images, by the frozen public transformer.

DP-Wavelet, algorithm 2, second half. Post-processing: it takes coarse tokens or coarse images, and
public models; it opens no private record and spends nothing.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpsynth.artifacts.files import sha256_file
from dpsynth.artifacts.sample_rows import Images
from dpsynth.artifacts.samples import SamplesWriter, read_samples
from dpsynth.artifacts.sheet import side_by_side
from dpsynth.artifacts.token_file import NAME as TOKENS
from dpsynth.console import counted, note, progress
from dpsynth.errors import DataError, UsageError, typed
from dpsynth.planning.verify import VerifiedPlan
from dpsynth.public.tokens import TokenSpace, load_token_space
from dpsynth.released.card import stamps
from dpsynth.released.coarse_source import GIVEN, Coarse, read_coarse
from dpsynth.released.completion_place import Place, own_name, place_of, require_free
from dpsynth.released.handout import hand_out
from dpsynth.released.sampling import fresh_generator, is_kept
from dpsynth.released.spectral import (
    completed,
    drawing_facts,
    drawing_of,
    space_facts,
)

PORT = "complete-wavelet"
SHARD = 125
COLUMNS = 8
"""Images of a class on the contact sheet, coarse and full each."""
_COLOURS = {1: "grey", 3: "colour (RGB)"}
_ROWS = 20  # classes shown there
_TITLE = 40  # characters of a class's name there: names of another source may have any length


@dataclass(frozen=True, eq=False)
class _Job:
    """One completion: n images of a source, by the models of a run."""

    verified: VerifiedPlan
    space: TokenSpace
    coarse: Coarse
    count: int

    @property
    def by_tokens(self) -> bool:
        """Whether the source has tokens that mean something to this run's tokenizer."""
        found = space_facts(self.verified.run)["tokenizer_sha256"]
        return self.coarse.ids is not None and self.coarse.tokenizer == found

    def captions(self, start: int, stop: int) -> list[str]:
        """What to draw for: an image's caption, else its label, else nothing."""
        coarse = self.coarse
        labels = coarse.labels[start:stop].tolist()
        texts = coarse.texts[start:stop]
        return [text or coarse.classes[y] for text, y in zip(texts, labels, strict=True)]


def complete_wavelet(
    verified: VerifiedPlan,
    count: int | None = None,
    *,
    coarse: str | None = None,
    out: str | None = None,
) -> dict[str, Any]:
    """Complete coarse samples: an image folder, a contact sheet, the hand-out around them.

    Labels and captions are carried over. A call that was cut short goes on where it ended.

    Args:
        verified: the run whose tokenizer and transformer are used.
        count: the first so many images; None for all.
        coarse: a run, an image folder or zip; None is the run's `released/coarse/`.
        out: see `completion_place.place_of`.

    Raises:
        UsageError: a plan with nothing to complete, a place that may not be read or written, a
            count beyond the images that there are.
        MissingError: the coarse samples, the public models or their sentence encoder are not there,
            or not whole.
        DataError: damaged images, or images of another size.
    """
    plan, run = verified.plan, verified.run
    _check(verified)
    found = read_coarse(verified, None if coarse is None else Path(coarse))
    count = len(found) if count is None else count
    if not 1 <= count <= len(found):
        drawn = typed("dpsynth", "sample", run.root, "-n", count)
        raise UsageError(
            f"{count} images were asked for, and there are {len(found)} coarse ones",
            hint=drawn if count > 0 and coarse is None else f"-n {len(found)}",
        )
    job = _Job(verified, load_token_space(run, plan), found, count)
    _require_size(job)
    place, origin = place_of(verified, found, out), origin_of(job)
    require_free(place, origin)
    if is_kept(place.folder, origin):
        note(f"{counted(count, 'completed image')} of these coarse ones: already there")
    else:
        _write(job, place, origin)
    _sheet(job, place)
    handed = hand_out(run) if place.handed and run.transcript.exists() else {}
    return {
        "samples": str(place.folder),
        "count": count,
        "coarse": str(found.path),
        "contact_sheet": str(place.sheet),
        **handed,
    }


def origin_of(job: _Job) -> dict[str, Any]:
    """What the completed images are made of: hashes of all, and how tokens are drawn."""
    plan, run, coarse = job.verified.plan, job.verified.run, job.coarse
    return {
        "port": PORT,
        "coarse": coarse.origin,
        "coarse_sha256": coarse.sha256,
        "source": "own" if own_name(run, coarse) else "given",
        "taken": "tokens" if job.by_tokens else "images",
        "count": job.count,
        **({"tokens_sha256": sha256_file(coarse.path / TOKENS)} if job.by_tokens else {}),
        **space_facts(run),
        **drawing_facts(plan),
    }


def own_completion(verified: VerifiedPlan, count: int) -> tuple[dict[str, Any], int]:
    """Origin of so many completed samples of the run's own, and how many coarse ones there are.

    Raises MissingError or DataError where the coarse samples are not whole.
    """
    space = load_token_space(verified.run, verified.plan)
    coarse = read_coarse(verified, None)
    return origin_of(_Job(verified, space, coarse, count)), len(coarse)


def _check(verified: VerifiedPlan) -> None:
    plan = verified.plan
    if plan.is_completed:
        return
    if plan.tokens is None:
        raise UsageError(
            f"the plan {plan.name} has no spectral tokens: nothing says how to complete detail",
            hint="name a run whose plan has a section `tokens:`",
        )
    raise UsageError(
        "tokens.levels: 0 is raster order, whose samples are whole already",
        hint=typed("dpsynth", "sample", verified.run.root),
    )


def _require_size(job: _Job) -> None:
    """Refuse images that are neither of the full size nor of the size of LL."""
    wavelet = job.space.tokenizer.wavelet
    full, small = wavelet.shape, (*wavelet.sides(0), wavelet.shape[2])
    found = job.coarse.images(0, 1).shape[1:]
    if found not in (full, small):
        said, one, other = ("x".join(map(str, shape)) for shape in (found, full, small))
        raise DataError(
            f"the coarse images are {said}; expected {one}, the plan's images, or {other}, their "
            "coarse band",
            hint="resize them, or name the run whose plan has their size"
            if found[2] == full[2]
            else f"convert them to {_COLOURS.get(full[2], f'{full[2]} channels')}",
        )
    if job.by_tokens and job.coarse.ids is not None:
        ids = job.coarse.ids[: job.count]
        job.space.tokenizer.layout.last(ids.shape[1])
        if ids.min() < 0 or ids.max() >= job.space.tokenizer.settings.codebook:
            raise DataError("the coarse tokens lie outside the codebook", hint="dpsynth sample RUN")


def _write(job: _Job, place: Place, origin: dict[str, Any]) -> None:
    """Complete and write what is missing, shard by shard."""
    coarse, plan = job.coarse, job.verified.plan
    texts = job.captions(0, job.count)
    without = texts.count("")
    if without:
        note(f"{counted(without, 'image')} without a caption or a label: drawn for the empty one")
    stamp = stamp_of(job)
    source, text = fresh_generator(), job.space.text_of(texts)  # before anything is written
    writer = SamplesWriter(place.folder, coarse.classes, origin=origin, stamp=stamp)
    with progress("completing", job.count, completed=writer.written) as bar:
        for start in range(writer.written, job.count, SHARD):
            stop = min(job.count, start + SHARD)
            prefix, ll = _given(job, start, stop)
            images = completed(
                job.space,
                prefix,
                ll,
                text[start:stop],
                drawing=drawing_of(plan),
                source=source,
            )
            writer.add(images, coarse.labels[start:stop], coarse.texts[start:stop])
            bar.advance(stop - start)
    writer.finish()


def _given(job: _Job, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
    """Coarse tokens (n, p) of these images, and the LL (n, h, w, C) to keep, if any.

    Images of a source without tokens keep their LL to the bit that they have; what the tokens say
    of it only leads the transformer.
    """
    tokenizer, coarse = job.space.tokenizer, job.coarse
    if job.by_tokens and coarse.ids is not None:
        ids = torch.from_numpy(coarse.ids[start:stop, : job.space.dim].astype(np.int64))
        return ids, None
    images = torch.from_numpy(np.array(coarse.images(start, stop)))
    if tuple(images.shape[1:]) == tokenizer.wavelet.shape:
        pyramid = tokenizer.wavelet(images)
        return tokenizer.encode_pyramid(pyramid, job.space.tokens.private), pyramid.ll
    low = tokenizer.wavelet.coarse_coefficients(images.float() / 255.0)
    return tokenizer.encode_coarse(images), low


def _sheet(job: _Job, place: Place) -> None:
    """The contact sheet: of each class, coarse images beside the full ones that they became."""
    coarse, shape = job.coarse, job.space.tokenizer.wavelet.shape
    images, labels = read_samples(place.folder, coarse.classes, shape, most=COLUMNS)
    rows = []
    for y in np.unique(labels)[:_ROWS].tolist():  # classes of which there are images
        places = np.flatnonzero(coarse.labels[: job.count] == y)[:COLUMNS]
        before = np.concatenate([coarse.images(int(i), int(i) + 1) for i in places])
        full = images[labels == y][:COLUMNS]
        rows.append((coarse.classes[y][:_TITLE], [_enlarged(before, shape), full]))
    title = f"{job.verified.plan.name}: coarse, and completed by the public transformer"
    side_by_side(rows, ["coarse", "completed"], place.sheet, title, stamp_of(job))


def stamp_of(job: _Job) -> dict[str, str]:
    """Text fields of images and sheet: the run's, warnings of the coarse ones, and who vouches."""
    own = own_name(job.verified.run, job.coarse) is not None
    given = {} if own else {GIVEN: "completed from coarse images that no run vouches for"}
    return {**job.coarse.stamp, **given, **stamps(job.verified.lock)}


def _enlarged(images: Images, shape: tuple[int, int, int]) -> Images:
    """Images of LL's size (n, h, w, C) as large as whole ones, nearest neighbour."""
    if images.shape[1:] == shape:
        return images
    factor = -(-shape[0] // images.shape[1])
    large = images.repeat(factor, axis=1).repeat(factor, axis=2)
    return large[:, : shape[0], : shape[1]]
