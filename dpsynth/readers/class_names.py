"""Names of the classes that a folder or zip of pictures has, where no plan declares them."""

from collections.abc import Iterable
from pathlib import PurePosixPath

from dpsynth.errors import DataError
from dpsynth.planning.caption_rules import PUBLIC
from dpsynth.readers.metadata import MOST_METADATA, NAMES, parse_metadata
from dpsynth.readers.picture import SUFFIXES
from dpsynth.readers.records import UnreadableSourceError
from dpsynth.readers.tree import READ_ERRORS, TooLargeError, Tree


def classes_of(tree: Tree, what: str) -> tuple[str, ...]:
    """Names of the classes, sorted; none where its pictures have no labels.

    `what`: how an error calls the folder or zip.

    Raises:
        DataError: only some pictures have a label.
        UnreadableSourceError: its metadata is damaged.
    """
    found = [name for name in tree.listing.files if PurePosixPath(name).name in NAMES]
    top = [name for name in found if len(PurePosixPath(name).parts) <= 2]
    if top:
        try:
            rows = parse_metadata(top[0], tree.read(top[0], MOST_METADATA), None, PUBLIC)
            labels = {row.label for row in rows if not row.fault}
        except (TooLargeError, *READ_ERRORS) as error:
            raise UnreadableSourceError("folder", f"{top[0]}: {error}") from error
    else:
        pictures = [PurePosixPath(n) for n in tree.listing.files if _is_picture(n)]
        labels = {path.parent.name for path in pictures}
        # One folder alone is no class: pictures in the folder that an archiver wrapped around them.
        labels = {""} if len(labels) == 1 else labels
    if "" in labels and len(labels) > 1:
        raise DataError(
            f"{what}: some images have a label and some have none",
            hint="label every image, or none",
        )
    return in_order(labels - {""})


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """Class names sorted: as numbers where all are.

    >>> in_order({"10", "9", "0"}), in_order({"b", "a", "10"})
    (('0', '9', '10'), ('10', 'a', 'b'))
    """
    listed = sorted(names)
    return tuple(sorted(listed, key=int) if all(n.isdecimal() for n in listed) else listed)


def _is_picture(name: str) -> bool:
    return PurePosixPath(name).suffix.lower() in SUFFIXES
