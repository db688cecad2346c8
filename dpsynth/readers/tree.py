"""The files of a folder or a zip, seen alike: names, hidden files, entries that lead outside."""

import os
import stat
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Protocol

from dpsynth.readers.records import UnreadableSourceError

HIDDEN = frozenset({"__MACOSX", "Thumbs.db", "desktop.ini"})


def is_hidden(name: str) -> bool:
    """Whether a system or an editor left this file, not the custodian.

    >>> is_hidden("cat/.DS_Store"), is_hidden("__MACOSX/cat/1.png"), is_hidden("cat/1.png")
    (True, True, False)
    """
    parts = PurePosixPath(name).parts
    return any((part.startswith(".") and part != "..") or part in HIDDEN for part in parts)


READ_ERRORS = (
    OSError,
    EOFError,
    ValueError,
    RuntimeError,
    NotImplementedError,
    zipfile.BadZipFile,
    zlib.error,
)


_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)


class TooLargeError(Exception):
    """A file is larger than any record of the declared shape needs to be."""


@dataclass
class Listing:
    """Names relative to the root: `files` to read, `refused` with why, `hidden` passed over."""

    files: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    hidden: list[str] = field(default_factory=list)


class Tree(Protocol):
    """An opened folder or zip."""

    listing: Listing

    def read(self, name: str, most: int) -> bytes:
        """The bytes of one listed file.

        Raises:
            TooLargeError: there are more than `most` of them.
            READ_ERRORS: the file is damaged, gone or unreadable.
        """
        ...


@contextmanager
def open_tree(path: Path) -> Iterator[Tree]:
    """Open a directory, or a zip file as if it were one.

    Raises:
        UnreadableSourceError: `path` is neither.
    """
    if path.is_dir():
        yield _Directory(path)
        return
    try:
        archive = zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise UnreadableSourceError("folder", f"{type(error).__name__}: {error}") from error
    with archive:
        yield _Zip(archive)


class _Directory:
    def __init__(self, root: Path) -> None:
        self._root = str(root.resolve())
        self._links: set[str] = set()
        self.listing = Listing()
        # Of each folder its files by name, then what is below its folders, by name.
        waiting = [("", False)]
        while waiting:
            folder, hidden = waiting.pop()
            waiting += reversed([*self._add_folder(folder, hidden)])

    def _add_folder(self, folder: str, hidden: bool) -> Iterator[tuple[str, bool]]:
        """List one folder; yield those inside. Names end with a slash, and the root's is empty."""
        try:
            with os.scandir(f"{self._root}/{folder}") as found:
                entries = sorted(found, key=lambda entry: entry.name)
                folders = [_is_folder(entry) for entry in entries]
        except OSError as error:
            raise UnreadableSourceError("folder", f"{type(error).__name__}: {error}") from error
        for wanted in (False, True):
            for entry, is_folder in zip(entries, folders, strict=True):
                name = folder + entry.name
                below = hidden or entry.name.startswith(".") or entry.name in HIDDEN
                if is_folder is not wanted:
                    continue
                if is_folder and not entry.is_symlink():
                    yield f"{name}/", below
                elif below:
                    self.listing.hidden.append(name)
                else:
                    self._add_file(name, entry)

    def _add_file(self, name: str, entry: os.DirEntry[str]) -> None:
        reason = "" if entry.is_file(follow_symlinks=False) else "no regular file"
        if entry.is_symlink():
            self._links.add(name)
            reason = _link_refusal(Path(entry.path), Path(self._root))
        if reason:
            self.listing.refused[name] = reason
        else:
            self.listing.files.append(name)

    def read(self, name: str, most: int) -> bytes:
        path = f"{self._root}/{name}"
        if name in self._links:
            path = os.path.realpath(path, strict=True)
        # A file that was none may have become a link since it was listed: then it is not opened.
        file = os.open(path, os.O_RDONLY | _NO_LINK)
        try:
            # One byte more than there are shows the end, without room for `most` of them.
            left = min(os.fstat(file).st_size, most) + 1
            pieces = []
            while left and (piece := os.read(file, left)):
                pieces.append(piece)
                left -= len(piece)
        finally:
            os.close(file)
        content = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if len(content) > most:
            raise TooLargeError
        return content


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # such as a link to itself
        return False


def _link_refusal(path: Path, root: Path) -> str:
    try:
        target = path.resolve(strict=True)
        mode = target.stat().st_mode
    except (OSError, RuntimeError):
        return "a symlink that leads nowhere"
    if not target.is_relative_to(root):
        return "a symlink out of the folder"
    if stat.S_ISDIR(mode):
        return "a symlink to a folder; these are not followed"
    return "" if stat.S_ISREG(mode) else "no regular file"


def _stays_inside(path: PurePosixPath) -> bool:
    """Whether an entry's name is relative, goes nowhere up, and starts with no drive letter."""
    return not path.is_absolute() and ".." not in path.parts and ":" not in "".join(path.parts[:1])


class _Zip:
    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        self.listing = Listing()
        entries = [entry for entry in archive.infolist() if not entry.is_dir()]
        counts = Counter(entry.filename for entry in entries)
        for entry in entries:
            self._add(entry, counts[entry.filename])

    def _add(self, entry: zipfile.ZipInfo, copies: int) -> None:
        name = entry.filename
        path = PurePosixPath(name.replace("\\", "/"))
        if is_hidden(path.as_posix()):
            self.listing.hidden.append(name)
        elif not _stays_inside(path):
            self.listing.refused[name] = "a path out of the archive"
        elif stat.S_ISLNK(entry.external_attr >> 16):
            self.listing.refused[name] = "a symlink in an archive"
        elif entry.flag_bits & 1:
            self.listing.refused[name] = "an encrypted entry"
        elif copies > 1:
            self.listing.refused[name] = "more than one entry of this name"
        else:
            self.listing.files.append(name)

    def read(self, name: str, most: int) -> bytes:
        # Read in bounded measure: the declared size of an entry may be a lie.
        with self._archive.open(name) as file:
            content = file.read(most + 1)
        if len(content) > most:
            raise TooLargeError
        return content
