"""The public token space of a run: records in, spectral tokens out, and back (DP-Wavelet, 2.3)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpsynth.artifacts.files import read_json, sha256_file
from dpsynth.artifacts.rooms import RunDir
from dpsynth.artifacts.settled import require_calibration
from dpsynth.errors import MissingError, UsageError, typed
from dpsynth.models.autoencoder import as_bytes
from dpsynth.models.wavelet.autoregressive import Autoregressive, load_transformer
from dpsynth.models.wavelet.causal import Sizes
from dpsynth.models.wavelet.stored import load_tokenizer
from dpsynth.models.wavelet.tokenizer import Tokenizer, TokenizerSettings
from dpsynth.planning.schema import Plan
from dpsynth.planning.tokens import Tokens
from dpsynth.public.token_captions import ENCODER_KEY, CaptionReader, caption_reader
from dpsynth.public.tokenizer import TOKENIZER

TRANSFORMER = "transformer.safetensors"
TOKENIZER_KEY, TRANSFORMER_KEY = "tokenizer_sha256", "transformer_sha256"
"""Under which the calibration names the two files."""
_PART = 256


@dataclass(frozen=True, eq=False)
class TokenSpace:
    """Tokenizer and public transformer of a run, both frozen and in eval mode.

    An image has T tokens; private training sees the first `dim` of them. `encoder_sha256`: of the
    sentence encoder that the calibration names, if any.
    """

    tokenizer: Tokenizer
    transformer: Autoregressive
    tokens: Tokens
    encoder_sha256: str | None = None
    elementwise: ClassVar[bool] = False

    @property
    def dim(self) -> int:
        """How many of an image's tokens are private: those of the scales up to j0."""
        return self.tokenizer.layout.coarse(self.tokens.private)

    def encode_exact(self, images: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Private tokens (n, dim) of records (n, H, W, C); finer ones are never computed.

        Each record alone: its tokens are those bits whatever was encoded before or beside it.
        """
        self._check(images)
        data = torch.from_numpy(np.array(images, order="C"))
        found: NDArray[np.int64] = self.tokenizer.encode_exact(data, self.tokens.private).numpy()
        return found

    def encode(self, images: NDArray[np.uint8]) -> Tensor:
        """All tokens int64 (n, T) of public or synthetic images (n, H, W, C), in batches."""
        self._check(images)
        return ids_of(self.tokenizer, images)

    def decode(self, ids: Tensor) -> NDArray[np.uint8]:
        """Images (n, H, W, C) of ids (n, t), a prefix of whole scales; details left out are zero.

        Raises:
            UsageError: a prefix that ends inside a scale, or an id outside the codebook.
        """
        height, width, channels = self.tokenizer.wavelet.shape
        found = [np.zeros((0, height, width, channels), dtype=np.uint8)]
        for part in torch.split(ids, _PART):
            pixels = self.tokenizer.decode(part).permute(0, 3, 1, 2)
            found.append(as_bytes(pixels))
        return np.concatenate(found)

    def text_of(self, captions: Sequence[str]) -> Tensor:
        """Captions as the transformer reads them: see `CaptionReader`.

        Raises:
            MissingError, DataError, UsageError: the encoder is gone, damaged or another one.
        """
        return self._reader(captions)

    @cached_property
    def _reader(self) -> CaptionReader:
        """Loaded when first asked for: images are encoded and decoded without an encoder."""
        return caption_reader(self.tokens.transformer, self.encoder_sha256)

    def _check(self, images: NDArray[np.uint8]) -> None:
        if images.shape[1:] != self.tokenizer.wavelet.shape:
            raise UsageError(
                f"images of shape {images.shape[1:]} were given, expected "
                f"{self.tokenizer.wavelet.shape}"
            )


def load_token_space(run: RunDir, plan: Plan) -> TokenSpace:
    """The run's tokenizer and public transformer, which its calibration names by hash.

    Raises:
        MissingError: `dpsynth pretrain` has not finished.
        UsageError: the plan has no tokens, or a file is not the one that the calibration names.
        ReplayError: the calibration is not the one that the run's charges name.
    """
    files = {TOKENIZER_KEY: run.public / TOKENIZER, TRANSFORMER_KEY: run.public / TRANSFORMER}
    settings, sizes, tokens = settings_of(plan), sizes_of(plan), tokens_of(plan)
    if not all(path.exists() for path in (*files.values(), run.calibration)):
        raise MissingError(
            "the public tokenizer and transformer are not there yet",
            hint=typed("dpsynth", "pretrain", run.root),
        )
    require_calibration(run)
    facts = read_json(run.calibration)
    for key, path in files.items():
        if sha256_file(path) != facts.get(key):
            raise UsageError(
                f"{path.name} is not the file that {run.calibration.name} names",
                hint=typed("dpsynth", "pretrain", run.root),
            )
    tokenizer, _ = load_tokenizer(files[TOKENIZER_KEY], settings)
    transformer, _ = load_transformer(files[TRANSFORMER_KEY], sizes)
    # A calibration that names no encoder is of no plan with one: "" is nothing's hash.
    encoder = None if tokens.transformer.encoder is None else str(facts.get(ENCODER_KEY, ""))
    return TokenSpace(tokenizer, transformer.requires_grad_(False), tokens, encoder)


def ids_of(
    tokenizer: Tokenizer, images: NDArray[np.uint8], advance: Callable[[int], None] | None = None
) -> Tensor:
    """All tokens int64 (n, T) of public or synthetic images (n, H, W, C), in batches.

    `advance` is called with the number of images that were done.
    """
    found = [torch.zeros(0, tokenizer.layout.tokens, dtype=torch.int64)]
    for start in range(0, len(images), _PART):
        part = np.array(images[start : start + _PART], order="C")
        found.append(tokenizer.encode(torch.from_numpy(part)))
        if advance is not None:
            advance(len(part))
    return torch.cat(found)


def tokens_of(plan: Plan) -> Tokens:
    """The plan's section `tokens`.

    Raises:
        UsageError: it has none.
    """
    if plan.tokens is None:
        raise UsageError(
            f"the plan {plan.name} has no spectral tokens", hint="give it a section `tokens:`"
        )
    return plan.tokens


def settings_of(plan: Plan) -> TokenizerSettings:
    """The shape of the plan's tokenizer, for images of its shape."""
    tokens, image = tokens_of(plan), plan.private.image
    made = tokens.tokenizer
    return TokenizerSettings(
        image.height,
        image.width,
        image.channels,
        tokens.levels,
        tokens.patches(image.height, image.width),
        wavelet=tokens.wavelet,
        hidden=made.hidden,
        depth=made.depth,
        heads=made.heads,
        codebook=made.codebook,
        code=made.code,
        shared=made.shared,
    )


def sizes_of(plan: Plan) -> Sizes:
    """The sizes of the plan's transformer: private tokens are its coarse part.

    In raster order (no levels) all tokens are private and of one codebook: it has one part.
    """
    tokens, image = tokens_of(plan), plan.private.image
    counts = tokens.counts(image.height, image.width)
    made = tokens.transformer
    return Sizes(
        tokens=sum(counts),
        codes=tokens.tokenizer.codebook,
        coarse=tokens.private_tokens(image.height, image.width) if tokens.levels else None,
        approximation=counts[0] if settings_of(plan).codebooks == 2 else 0,
        width=made.width,
        depth=made.depth,
        heads=made.heads,
        text=made.stream,
    )


def token_files(plan: Plan) -> dict[str, str]:
    """The two files by the calibration's keys for them; none for a plan without tokens."""
    if plan.tokens is None:
        return {}
    return {TOKENIZER_KEY: TOKENIZER, TRANSFORMER_KEY: TRANSFORMER}
