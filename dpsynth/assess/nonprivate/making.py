"""`dpsynth reference`: images of a plan without privacy, or of its public model, for the curator.

A ceiling and a floor for what the private run gives. Nothing is charged, no free slot is needed,
and nothing is written outside `curator/`; what a reference shows of private records is protected by
nothing.
"""

from typing import Any

import torch

from dpsynth.artifacts.files import canonical_json, owner_only, sha256_bytes, sha256_file
from dpsynth.artifacts.nonprivate import TEXTS, Kind, reference_stamps
from dpsynth.artifacts.samples import SamplesWriter, read_samples
from dpsynth.artifacts.sheet import contact_sheet, rows_by_class
from dpsynth.artifacts.trained import WARM
from dpsynth.assess.nonprivate import flows, tokens
from dpsynth.assess.nonprivate.flows import (
    Pictures,
    guides_by_release,
    start_weights,
    uses_training,
)
from dpsynth.assess.nonprivate.room import Place, is_kept, put_in_place
from dpsynth.console import counted, note, progress
from dpsynth.errors import UsageError
from dpsynth.planning.verify import VerifiedPlan
from dpsynth.released.asked import Asked, asked_of
from dpsynth.released.sampling import fresh_generator
from dpsynth.vault.checked import fingerprint

SHARD = 500
_SHOWN = 10
# Raise it when the same plan and records give another reference.
_VERSION = 1


def reference(
    verified: VerifiedPlan, kind: Kind = "nonprivate", count: int | None = None
) -> dict[str, Any]:
    """Draw `curator/reference-KIND/`, an image folder, with a contact sheet beside it.

    Works before and after the private stages. What an earlier call made of the same plan, public
    files, records and count is kept, and one that was cut off goes on.

    Args:
        verified: the run.
        kind: "nonprivate": the plan without clip and noise; "pretrained": its public model.
        count: images in all; the plan's `sampling.count` if None.

    Returns:
        Where things lie, and the count: nothing that was computed from private records.

    Raises:
        UsageError: an unknown kind, or a count below 1.
        PlanError: nothing private goes into the plan's images.
        MissingError: an earlier public step has not run.
        DataError: nothing was charged yet, and the records do not fit the plan.
    """
    plan, run = verified.plan, verified.run
    count = plan.sampling.count if count is None else count
    _check(kind, count)
    run.make_rooms()
    place, asked = Place(run, kind), asked_of(plan)
    recipe = _recipe(verified, kind)
    origin = {"reference": kind, "recipe": recipe, "count": count, **_drawn_for(verified, asked)}
    if is_kept(place, origin):
        note(f"{counted(count, 'image')} of this reference {'is' if count == 1 else 'are'} there")
    else:
        with owner_only():
            _write(verified, _pictures(verified, asked, place, recipe), asked, place, origin)
    return {
        "reference": kind,
        "count": count,
        "where": str(place.folder),
        "contact_sheet": str(place.sheet),
    }


def _check(kind: str, count: int) -> None:
    if kind not in TEXTS:
        raise UsageError(f"there is no reference {kind!r}", hint=f"--kind {'|'.join(TEXTS)}")
    if count < 1:
        raise UsageError(f"{count} images were asked for; expected at least 1", hint="-n 1000")


def _recipe(verified: VerifiedPlan, kind: Kind) -> str:
    """Hash of all that the model follows from. Curator-only: it knows the private files."""
    run, plan = verified.run, verified.plan
    parts: list[Any] = [_VERSION, kind, verified.lock.plan_hash, sha256_file(run.calibration)]
    if kind == "nonprivate":
        parts += [fingerprint(verified), verified.lock.unsafe_seed]
        if uses_training(plan):
            name = start_weights(verified)
            room = run.released if name in {"distilled.safetensors", WARM} else run.public
            parts += [name, sha256_file(room / name)]
    return sha256_bytes(canonical_json(parts))


def _drawn_for(verified: VerifiedPlan, asked: Asked) -> dict[str, Any]:
    """What the images follow from beside the model: their captions, and a release that guides."""
    found: dict[str, Any] = {
        "captions_sha256": sha256_bytes(canonical_json({"captions": asked.captions}))
    }
    if uses_training(verified.plan) and guides_by_release(verified):
        files = sorted(verified.run.released.glob("*moments.safetensors"))
        found["guided_by"] = [sha256_file(path) for path in files]
    return found


def _pictures(verified: VerifiedPlan, asked: Asked, place: Place, recipe: str) -> Pictures:
    """How the images are drawn, after whatever is trained for it; completed as the plan's are."""
    on_tokens, public = verified.plan.learns_tokens, place.kind == "pretrained"
    if on_tokens and public:
        return tokens.pretrained_pictures(verified, asked)
    if on_tokens:
        return tokens.nonprivate_pictures(verified, asked, place, recipe)
    if public:
        coarse = flows.pretrained_pictures(verified, asked)
    else:
        coarse = flows.nonprivate_pictures(verified, asked, place, recipe)
    return tokens.with_detail(verified, asked, coarse) if verified.plan.is_completed else coarse


def _write(
    verified: VerifiedPlan,
    pictures: Pictures,
    asked: Asked,
    place: Place,
    origin: dict[str, Any],
) -> None:
    """Draw what is missing, shard by shard; then the sheet, the stamps, and the folder's place."""
    classes, count = verified.plan.private.classes, int(origin["count"])
    stamp = reference_stamps(place.kind)
    writer = SamplesWriter(place.making, classes, origin=origin, stamp=stamp)
    source = fresh_generator()
    with progress(f"sampling the {place.kind} reference", count, writer.written) as bar:
        for first in range(writer.written, count, SHARD):
            labels = torch.arange(first, min(count, first + SHARD)) % asked.count
            texts = [asked.captions[y] for y in labels.tolist()]
            writer.add(pictures(labels, source), asked.classes[labels.numpy()], texts)
            bar.advance(len(labels))
    writer.finish()
    images, labels_ = read_samples(place.making, classes, most=_SHOWN)
    title = f"{verified.plan.name}: {place.kind} reference\n{TEXTS[place.kind]}"
    contact_sheet(rows_by_class(images, labels_, classes), place.sheet, title=title, stamp=stamp)
    put_in_place(place, classes, origin)
