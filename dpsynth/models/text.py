"""Captions as tokens of a frozen public table (StraightDP, Table 9: width 64, length 8, 256 rows).

Words are hashed to rows, and rows are worked out from hashes too, in whole numbers: both are the
same on every machine, know no data, and need no file.
"""

import hashlib
import re
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dpsynth.errors import UsageError
from dpsynth.planning.captions import words_of

PADDING, START = 0, 1
"""Row 0 is no word; row 1 stands for the caption as such, and is all of the empty caption."""
_FIRST = 2
_SALT = "dpsynth-word-57"
"""One of few under which digits, their names and Fashion-MNIST's words keep apart in 256 rows."""
_WORD = re.compile(r"\w+|[^\w\s\x00-\x7f]")


def words(caption: str) -> list[str]:
    """Words of a caption, case folded; a sign beyond ASCII, such as an emoji, is a word.

    >>> words("A thin, bold T-shirt")
    ['a', 'thin', 'bold', 't', 'shirt']
    """
    return _WORD.findall(words_of(caption))


def word_id(word: str, vocabulary: int) -> int:
    """The row of a word, from 2 to vocabulary - 1, by its SHA-256.

    >>> word_id("three", 256), word_id("seven", 256)
    (9, 32)
    """
    digest = hashlib.sha256(f"{_SALT}/{word}".encode()).digest()
    return _FIRST + int.from_bytes(digest[:8], "big") % (vocabulary - _FIRST)


def tokens(captions: Sequence[str], length: int, vocabulary: int) -> Tensor:
    """Token ids int64 (n, length) of captions: the first `length` words, then padding (0).

    A caption without words is the one token 1.

    Raises:
        UsageError: a table of fewer than 3 rows.
    """
    if vocabulary <= _FIRST:
        raise UsageError(
            f"a caption table of {vocabulary} rows has no row for a word",
            hint="write velocity.text.vocabulary: 256",
        )
    found = torch.full((len(captions), length), PADDING, dtype=torch.int64)
    for row, caption in zip(found, captions, strict=True):
        ids = [word_id(word, vocabulary) for word in words(caption)[:length]] or [START]
        row[: len(ids)] = torch.tensor(ids)
    return found


def table(vocabulary: int, width: int) -> Tensor:
    """The frozen table, float32 (vocabulary, width): entries uniform, of mean 0 and variance 1.

    Whole numbers of SHAKE-256, divided by a power of two and multiplied by sqrt(3).
    """
    rows = [
        hashlib.shake_256(f"dpsynth-text-1/{row}".encode()).digest(4 * width)
        for row in range(vocabulary)
    ]
    drawn = np.frombuffer(b"".join(rows), dtype=">u4").astype(np.float64)
    uniform = (drawn + 0.5) / 2.0**31 - 1.0
    return torch.from_numpy((uniform * 3.0**0.5).astype(np.float32)).view(vocabulary, width)


def require_distinct(captions: Sequence[str], ids: Tensor, *, where: str = "velocity.text") -> None:
    """Refuse conditions whose tokens (n, length) are the same, or those of the empty caption.

    No model could tell them apart. `where`: the plan's section that says how they are read.

    Raises:
        UsageError: naming the first two.
    """
    seen = {(START, *[PADDING] * (ids.shape[1] - 1)): ""}
    for caption, row in zip(captions, ids.tolist(), strict=True):
        first = seen.get(tuple(row))
        if first is not None:
            raise UsageError(
                f"the captions {first!r} and {caption!r} have the same tokens",
                hint=f"raise {where}.vocabulary (two words fell into one row) or "
                f"{where}.length (what tells them apart was cut off), or rename one",
            )
        seen[tuple(row)] = caption
