"""How the transformer over tokens reads a caption, in training, sampling and completion alike.

As words of a frozen table, or as the pooled embedding of a frozen sentence encoder: the encoders
of the caption release. Each caption is read alone, so that what it becomes is the same bits in any
company; private ones are read in memory, and nothing of them is kept.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpsynth.errors import MissingError, PlanError, UsageError
from dpsynth.models import text as words
from dpsynth.models.sentence import SentenceEncoder, encoder_folder, folder_sha256, load_encoder
from dpsynth.planning.tokens import TokenTransformer

ENCODER_KEY = "encoder_sha256"
"""Under which the calibration names the encoder; absent where captions are words of the table."""
_WHERE = "tokens.transformer"


@dataclass(frozen=True, eq=False)
class CaptionReader:
    """Captions as the plan's transformer reads them; `encoder` None reads words of the table."""

    settings: TokenTransformer
    encoder: SentenceEncoder | None = None

    def __call__(
        self, captions: Sequence[str], advance: Callable[[], None] = lambda: None
    ) -> Tensor:
        """Token ids int64 (n, length), or embeddings float32 (n, 1, encoder_width).

        Embeddings are scaled to entries of mean square 1, as the table's are. A caption without
        words, or whose embedding is not finite, is zero: what a dropped caption becomes.
        `advance` is called after each distinct caption that an encoder read.
        """
        if self.encoder is None:
            stream = self.settings.text
            return words.tokens(captions, stream.length, stream.vocabulary)
        places = {caption: row for row, caption in enumerate(dict.fromkeys(captions))}
        rows = np.zeros((len(places), 1, self.encoder.dim), dtype=np.float32)
        for caption, row in places.items():
            rows[row, 0] = _scaled(caption, self.encoder)
            advance()
        return torch.from_numpy(rows[[places[caption] for caption in captions]])

    def require_distinct(self, captions: Sequence[str]) -> None:
        """Refuse public conditions that read alike, or like the empty caption.

        Raises:
            UsageError: naming the first two.
        """
        found = self(captions)
        if self.encoder is None:
            words.require_distinct(captions, found, where=f"{_WHERE}.text")
            return
        seen = {bytes(4 * self.encoder.dim): ""}
        for caption, row in zip(captions, found.numpy(), strict=True):
            first = seen.setdefault(row.tobytes(), caption)
            if first != caption:
                raise UsageError(
                    f"the captions {first!r} and {caption!r} have the same embedding",
                    hint=f"rename one, or name another {_WHERE}.encoder",
                )


def caption_reader(settings: TokenTransformer, sha256: str | None = None) -> CaptionReader:
    """The plan's reader; with its encoder, which must be that of `sha256` unless that is None.

    Raises:
        MissingError: the encoder, its package or its weights are not there.
        DataError: it cannot be read.
        PlanError: its embeddings have another length than the plan says.
        UsageError: it is another encoder.
    """
    if settings.encoder is None:
        return CaptionReader(settings)
    _require_there(settings)
    encoder = load_encoder(settings.encoder)
    if sha256 is not None and encoder.sha256 != sha256:
        raise UsageError(
            "the sentence encoder is not the one that the run's transformer was made by",
            hint=f"put back the folder of {_WHERE}.encoder; a run that has spent nothing yet: "
            "dpsynth pretrain RUN",
        )
    if encoder.dim != settings.encoder_width:
        raise PlanError(
            f"{_WHERE}.encoder_width is {settings.encoder_width}, and the sentence encoder has "
            f"{encoder.dim} numbers",
            hint=f"write `encoder_width: {encoder.dim}`",
        )
    return CaptionReader(settings, encoder)


def encoder_sha256(settings: TokenTransformer) -> str | None:
    """SHA-256 of the encoder's folder; None for a plan without one.

    Raises:
        MissingError: it is not there.
    """
    if settings.encoder is None:
        return None
    _require_there(settings)
    return folder_sha256(encoder_folder(settings.encoder))


def _require_there(settings: TokenTransformer) -> None:
    if settings.encoder is None:
        return
    folder = encoder_folder(settings.encoder)
    if not folder.is_dir():
        raise MissingError(
            f"captions are read by a sentence encoder, and there is none at {folder}",
            hint=f"put the folder there, or correct `encoder:` under {_WHERE} in the plan: where "
            "it lies changes no hash",
        )


def _scaled(caption: str, encoder: SentenceEncoder) -> NDArray[np.float64]:
    """The embedding (dim,) of one caption, of mean square 1, or zeros."""
    nothing = np.zeros(encoder.dim)
    if not words.words(caption):
        return nothing
    found = encoder.embed([caption])[0]
    norm = float(np.sqrt(np.square(found).sum()))
    if not 0.0 < norm < np.inf:  # also where it is no number
        return nothing
    scaled: NDArray[np.float64] = found * (encoder.dim**0.5 / norm)
    return scaled
