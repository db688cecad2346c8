"""Whether a path is, holds or lies in what a plan declares private: names alone, nothing is opened.

For commands that take a path of the user's and must never meet a private record there.
"""

from collections.abc import Iterator
from pathlib import Path

from dpsynth.planning.schema import Plan, SourceHeldOut
from dpsynth.planning.source_kinds import FolderSource, IdxSource, NpzSource, Source
from dpsynth.readers.metadata import NAMES


def private_places(plan: Plan) -> list[Path]:
    """The files and folders of the plan's private source and of its held-out source."""
    held_out = plan.private.held_out
    sources = [plan.private.source]
    sources += [held_out.source] if isinstance(held_out, SourceHeldOut) else []
    return [place for source in sources for place in _places(source)]


def meets_private(plan: Plan, path: Path) -> bool:
    """Whether a private place is this path, lies above it, or below; by links of any kind too.

    Of a private folder its metadata file, which holds captions, is known under any other name.
    """
    resolved = path.resolve()
    for place in private_places(plan):
        private = place.resolve()
        if resolved.is_relative_to(private) or private.is_relative_to(resolved):
            return True
        if any(_same(above, private) for above in (resolved, *resolved.parents)):
            return True
        if any(_same(resolved, private / name) for name in NAMES):
            return True
    return False


def _places(source: Source) -> Iterator[Path]:
    match source:
        case FolderSource() | NpzSource():
            yield source.path
        case IdxSource():
            yield from (source.images, source.labels)


def _same(one: Path, other: Path) -> bool:
    """Whether both names are of one file or folder."""
    try:
        return one.samefile(other)
    except OSError:
        return False
