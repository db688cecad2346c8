"""Captions that are public: of public images, of a plan's conditions, and to draw images for."""

from collections.abc import Iterator
from pathlib import Path

from dpsynth.errors import DataError, MissingError, PlanError
from dpsynth.planning.caption_rules import caption_text, condition_captions
from dpsynth.planning.captions import FreeCaptions
from dpsynth.planning.schema import Plan, SourceHeldOut
from dpsynth.planning.source_kinds import FolderSource, IdxSource, NpzSource, Source

MOST_LINES = 4096
_MOST_BYTES = 1 << 23


def drawn_captions(plan: Plan) -> list[str]:
    """The captions that images are drawn for: of `sampling.captions`, else of the conditions.

    Private captions cannot be among them: nothing here reads the private source.

    Raises:
        PlanError: the file is one of the private source.
        MissingError, DataError: it is absent, or no list of captions.
    """
    if not isinstance(plan.private.captions, FreeCaptions) or plan.sampling.captions is None:
        return condition_captions(plan.private.captions, plan.private.classes)
    return sampling_captions(plan, plan.sampling.captions)


def sampling_captions(plan: Plan, path: Path) -> list[str]:
    """The captions of a public text file: UTF-8, one a line, each once.

    Raises:
        PlanError: the file is one of the private source.
        MissingError: there is no such file.
        DataError: no UTF-8, a line without a caption or with one given before, no line, too many.
    """
    require_public(plan, path)
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise MissingError(
            f"sampling.captions: {path} cannot be read: {error.strerror or type(error).__name__}",
            hint="correct its path under `sampling:` in the plan",
        ) from None
    try:
        lines = content.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise _no_list(path, "is not UTF-8") from None
    if not 0 < len(lines) < MOST_LINES or len(content) > _MOST_BYTES:
        raise _no_list(path, f"has {len(lines)} lines, expected 1 to {MOST_LINES - 1}")
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        text = caption_text(line)
        if not text:
            raise _no_list(path, f"has no caption of 1 to 1,000 characters in line {number}")
        if text in seen:
            raise _no_list(path, f"repeats line {seen[text]} in line {number}")
        seen[text] = number
    return list(seen)


def require_public(plan: Plan, path: Path) -> None:
    """Refuse a file of captions that is, or lies inside, what the plan declares private.

    Looks at names and at the files' identities; opens none.

    Raises:
        PlanError: it does.
    """
    held_out = plan.private.held_out
    sources = [plan.private.source]
    sources += [held_out.source] if isinstance(held_out, SourceHeldOut) else []
    resolved = path.resolve()
    for private in (where for source in sources for where in _places(source)):
        inside = resolved.is_relative_to(private.resolve())
        if inside or any(_same(above, private) for above in (resolved, *resolved.parents)):
            raise PlanError(
                "sampling.captions lies in the private source: images are drawn for public "
                "captions alone",
                hint="name a text file of captions that anyone may read",
            )


def _places(source: Source) -> Iterator[Path]:
    match source:
        case FolderSource() | NpzSource():
            yield source.path
        case IdxSource():
            yield from (source.images, source.labels)


def _same(one: Path, other: Path) -> bool:
    """Whether both names are of one file or folder, by links of any kind too."""
    try:
        return one.samefile(other)
    except OSError:
        return False


def _no_list(path: Path, why: str) -> DataError:
    return DataError(
        f"sampling.captions: {path.name} {why}",
        hint="write one caption a line, each once, as UTF-8 text",
    )
