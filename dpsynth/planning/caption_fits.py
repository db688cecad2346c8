"""Whether the parts of a plan that speak of captions fit together."""

from dpsynth.planning.captions import (
    MOST_CONDITIONS,
    CaptionRelease,
    FreeCaptions,
    Template,
)
from dpsynth.planning.section import misfit
from dpsynth.planning.source_kinds import FolderSource, NpzSource, Source
from dpsynth.planning.units import UnitColumn

TEXT = "text"
"""The column of a folder's metadata file that holds captions."""


def require_captions(
    captions: Template | FreeCaptions | None,
    release: CaptionRelease | None,
    *,
    classes: list[str],
    source: Source,
    unit: UnitColumn | None,
    velocity: str,
    space: str,
    moments: bool,
    drawn_for: bool,
) -> None:
    """Raise a ValueError that names the keys which do not fit together.

    `velocity`, `space`: kinds of the velocity model and of the representation; `moments`: whether
    there is such a stage; `drawn_for`: whether the plan names captions to draw images for.
    """
    if isinstance(captions, Template):
        _require_distinct(captions, classes)
    if captions is not None:
        _require_source(source, unit)
    if release is not None and release.features == "slots" and not isinstance(captions, Template):
        raise misfit(
            "features: slots needs private.captions of kind template",
            "stages.moments.captions.features",
            hint="write `features: sentence`, with an encoder"
            if isinstance(captions, FreeCaptions)
            else "declare private.captions: {kind: template, ...}, or write `features: one-hot`",
        )
    if isinstance(captions, FreeCaptions):
        if space != "tokens":
            _require_reader(release, velocity, moments)
        if not drawn_for:
            model = "" if space == "tokens" else "velocity.kind: mmdit and "
            raise misfit(
                f"captions of kind free need {model}sampling.captions",
                "sampling",
                "private.captions",
                hint="write `captions: FILE` under `sampling:`, a public text file, one caption a "
                "line; or a CSV file or an image folder with a column text",
            )
    elif drawn_for:
        raise misfit(
            "sampling.captions is for captions of kind free: a plan with a template draws images "
            "for all its fillings, and one without captions for its classes",
            "sampling.captions",
            hint="remove `captions` under `sampling:`",
        )


def has_captions(source: Source) -> bool:
    """Whether a source of this kind can hold captions, as it is declared."""
    return isinstance(source, FolderSource) or (
        isinstance(source, NpzSource) and source.captions is not None
    )


def _require_distinct(template: Template, classes: list[str]) -> None:
    count = template.count(classes)
    if count > MOST_CONDITIONS:  # first: below, all of them are listed
        raise misfit(
            f"the template has {count} fillings, more than {MOST_CONDITIONS}",
            "private.captions",
            hint="declare fewer slots, or fewer values",
        )
    if alike := template.alike(classes):
        one, other = alike
        raise misfit(
            f"two fillings of the template read alike: {one!r} and {other!r} (capitals and spaces "
            "do not tell captions apart)",
            "private.captions",
            hint="put words between the slots, or change a value",
        )


def _require_source(source: Source, unit: UnitColumn | None) -> None:
    if isinstance(source, NpzSource) and source.captions is None:
        raise misfit(
            "private.captions needs the name of the archive's array of captions",
            "private.source",
            hint="write `source: {kind: npz, path: ..., captions: captions}`",
        )
    if not has_captions(source):
        raise misfit(
            f"private.captions, and a source of kind {source.kind} has no captions: it needs "
            "private.source of kind folder (whose metadata file has a column text) or npz",
            "private.source",
        )
    column = source.captions if isinstance(source, NpzSource) else TEXT
    if unit is not None and unit.column == column:
        raise misfit(
            f"budget.unit.column is {unit.column}, which says what an image shows, not whose it is",
            "budget.unit.column",
            hint="name the column that tells whose an image is, or write `unit: record`",
        )


def _require_reader(release: CaptionRelease | None, velocity: str, moments: bool) -> None:
    """A flow, and what is released beside it, must be able to read free captions."""
    if moments and (release is None or release.features != "sentence"):
        raise misfit(
            "captions of kind free need stages.moments.captions with features: sentence",
            "stages.moments.captions",
            "private.captions",
            hint="write `captions: {features: sentence, encoder: minilm}` under stages.moments",
        )
    if velocity != "mmdit":
        raise misfit(
            "captions of kind free need velocity.kind: mmdit and sampling.captions",
            "velocity",
            "private.captions",
            hint="write `velocity: {kind: mmdit}`: a model that reads captions",
        )
