"""`tokens.safetensors`: the coarse tokens of a folder of samples, one row for each of its images.

So that `complete-wavelet` goes on from the very tokens that were drawn. The file names the
tokenizer that its ids mean something to, and the `metadata.csv` whose rows it goes by.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dpsynth.artifacts.tensors import load_release, save_tensors
from dpsynth.errors import DataError, UsageError

FORMAT = "dpsynth-tokens-1"
NAME = "tokens.safetensors"

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class TokenFile:
    """ids int32 (n, t), coarse to fine; SHA-256 of their tokenizer's file and of `metadata.csv`."""

    ids: Ids
    tokenizer: str
    metadata: str = ""


def save_tokens(path: Path, tokens: TokenFile) -> None:
    """Write atomically.

    Raises UsageError for ids that are no table of whole numbers.
    """
    if tokens.ids.ndim != 2 or tokens.ids.dtype != np.int32:
        raise UsageError(f"tokens are {tokens.ids.dtype} {tokens.ids.shape}, expected int32 (n, t)")
    facts = {"tokenizer_sha256": tokens.tokenizer, "metadata_sha256": tokens.metadata}
    save_tensors(path, {"ids": tokens.ids}, {**facts, "format": FORMAT, "room": "released"})


def load_tokens(path: Path) -> TokenFile:
    """Read what `save_tokens` wrote.

    Raises:
        MissingError: no such file.
        UsageError: damaged, or of another format.
        DataError: not the arrays that the format has.
    """
    arrays, metadata = load_release(path, FORMAT, by="sample")
    ids = arrays.get("ids")
    if set(arrays) != {"ids"} or ids is None or ids.dtype != np.int32 or ids.ndim != 2:
        raise DataError(
            f"{path.name} in {path.parent.name}/ holds no table `ids` of int32",
            hint="remove it, and its images are read instead",
        )
    return TokenFile(ids, metadata.get("tokenizer_sha256", ""), metadata.get("metadata_sha256", ""))


def joined(parts: Iterable[Path], tokenizer: str, metadata: str) -> TokenFile:
    """The tokens of all shards, in their order; of the tokenizer that all must name.

    Raises UsageError where a shard is of another one.
    """
    found = [load_tokens(path) for path in parts]
    if any(part.tokenizer != tokenizer for part in found):
        raise UsageError("shards of tokens are of several tokenizers")
    ids = np.concatenate([part.ids for part in found]) if found else np.zeros((0, 0), np.int32)
    return TokenFile(ids, tokenizer, metadata)
