"""The spectral tokens of a plan: tokenizer and transformer, both from public data (DP-Wavelet).

An image becomes tokens coarse to fine: scale 0 is the approximation LL0, scale j the details of
level j. What is private about an image is learned in the tokens of scales up to `private` alone.
With no levels there is one scale, the image itself, in raster order: the setting of DP-LlamaGen.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from dpsynth.planning.section import (
    Fraction,
    PathField,
    PositiveFloat,
    PositiveInt,
    Section,
    later,
    misfit,
)
from dpsynth.planning.velocity import TextStream
from dpsynth.planning.wavelets import LEAST, WAVELETS, canvas_of, nearest_wavelet

MOST_TOKENS = 4096
ENCODER_WIDTH = 384
"""Numbers of an embedding where a plan does not say: those of MiniLM."""
ROWS = 4
"""Rows of tokens in a subband where a plan does not say how large patches are; 8 with no levels."""


class SpectralTokenizer(Section):
    """Public training of the tokenizer (DP-Wavelet, section 2.3).

    `patches`: side of a patch in LL, then in the details of each level, the coarsest first; about
    4 rows of tokens a subband unless given. `hidden`, `depth`, `heads`: of encoder and decoder
    each. `codebook`: entries; `code`: numbers in one; `shared`: one codebook for approximation and
    details. `emphasis`: a scale's weight in the loss is its energy to this power.
    """

    patches: Annotated[list[PositiveInt], Field(min_length=1)] | None = None
    hidden: PositiveInt = 96
    depth: PositiveInt = 2
    heads: PositiveInt = 4
    codebook: Annotated[int, Field(ge=2)] = 256
    code: PositiveInt = 8
    shared: bool = False
    steps: PositiveInt = 1_500
    batch: PositiveInt = 64
    learning_rate: PositiveFloat = 2e-3
    emphasis: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.5
    decay: Fraction = 0.97

    @model_validator(mode="after")
    def _heads_fit(self) -> "SpectralTokenizer":
        if self.hidden % self.heads:
            raise misfit(f"hidden {self.hidden} is no multiple of heads {self.heads}", "heads")
        return self


class TokenTransformer(Section):
    """The text-conditioned autoregressive transformer; `prior` says how it is pretrained.

    Captions are words of `text`, or the pooled embedding of a frozen public sentence encoder
    (`encoder`: the folder of a sentence-transformers model, or `minilm` for that of an installed
    package; `encoder_width`: numbers of its embedding, 384 unless given).
    """

    width: PositiveInt = 96
    depth: PositiveInt = 3
    heads: PositiveInt | None = None
    text: TextStream = TextStream()
    encoder: Literal["minilm"] | PathField | None = later(None)
    encoder_width: PositiveInt | None = later(None)

    @model_validator(mode="before")
    @classmethod
    def _with_width(cls, values: Any) -> Any:
        """The width is always said: a folder is no fact, and so it alone tells of an encoder."""
        if not isinstance(values, dict) or values.get("encoder") is None:
            return values
        return {"encoder_width": ENCODER_WIDTH, **values}

    @model_validator(mode="after")
    def _encoder_fits(self) -> "TokenTransformer":
        if (self.encoder is None) is not (self.encoder_width is None):
            raise misfit(
                "encoder_width: the numbers of an embedding, given with `encoder` and with nothing "
                "else",
                "encoder_width",
                hint="write `encoder: minilm`, or leave `encoder_width` out",
            )
        if self.encoder is not None and self.text != TextStream():
            raise misfit(
                "text: of the table of words, and with `encoder` none is read",
                "text",
                hint="leave `text` out, or `encoder`",
            )
        return self

    @property
    def stream(self) -> TextStream:
        """Rows and numbers of a caption: its words in the table, or one embedding."""
        if self.encoder_width is None:
            return self.text
        return TextStream(width=self.encoder_width, length=1, vocabulary=1)

    @model_validator(mode="after")
    def _heads_fit(self) -> "TokenTransformer":
        if self.heads is not None and self.width % self.heads:
            raise misfit(f"width {self.width} is no multiple of heads {self.heads}", "heads")
        return self


class Tokens(Section):
    """Spectral tokens: which wavelet and how many levels, and up to which scale (j0) is private.

    With `levels: 0` tokens are in raster order, and all of them are private.
    """

    wavelet: str = "haar"
    levels: Annotated[int, Field(ge=0, le=8)] = 3
    private: Annotated[int, Field(ge=0)] = 0
    tokenizer: SpectralTokenizer = SpectralTokenizer()
    transformer: TokenTransformer = TokenTransformer()

    @model_validator(mode="after")
    def _parts_fit(self) -> "Tokens":
        if self.wavelet not in WAVELETS:
            raise misfit(
                f'wavelet "{self.wavelet[:60]}" is not known; expected haar, db1 to db38, sym2 to '
                "sym20, or coif1 to coif17 (the orthonormal ones of PyWavelets)",
                "wavelet",
                hint=nearest_wavelet(self.wavelet),
            )
        most = max(0, self.levels - 1)
        if self.private > most:
            raise misfit(
                f"private is {self.private}, and levels is {self.levels}: some scale must be left "
                "to the public transformer"
                if self.levels
                else f"private is {self.private}, and with `levels: 0` there is one scale alone",
                "private",
                hint=f"write `private: {most}`" + (" or less" if most else ""),
            )
        patches = self.tokenizer.patches
        if patches is not None and len(patches) != self.levels + 1:
            raise misfit(
                f"tokenizer.patches lists {len(patches)}, and levels: {self.levels} takes "
                f"{self.levels + 1}: a side for each scale",
                "tokenizer.patches",
                hint="write a side for each scale, coarse to fine, or leave `patches` out",
            )
        return self

    def patches(self, height: int, width: int) -> tuple[int, ...]:
        """Sides of the patches by scale, for images of this size.

        >>> Tokens().patches(64, 64), Tokens(levels=0).patches(64, 64)
        ((2, 2, 4, 8), (8,))
        """
        if self.tokenizer.patches is not None:
            return tuple(self.tokenizer.patches)
        rows = ROWS if self.levels else 2 * ROWS
        sides = (max(self.band(height, width, scale)) for scale in range(self.levels + 1))
        return tuple(-(-side // rows) for side in sides)

    def band(self, height: int, width: int, scale: int) -> tuple[int, int]:
        """Sides of a subband of `scale`: 0 is LL, j the details of level j, the coarsest first."""
        rows, columns = canvas_of(height, width, self.levels, None)
        down = self.levels + 1 - max(scale, 1)
        return rows >> down, columns >> down

    def counts(self, height: int, width: int) -> tuple[int, ...]:
        """Tokens of each scale, coarse to fine.

        >>> Tokens().counts(64, 64)
        (16, 48, 48, 48)
        """
        counts = []
        for scale, patch in enumerate(self.patches(height, width)):
            rows, columns = self.band(height, width, scale)
            counts.append((3 if scale else 1) * -(-rows // patch) * -(-columns // patch))
        return tuple(counts)

    def private_tokens(self, height: int, width: int) -> int:
        """How many of an image's tokens private training sees: the first ones."""
        return sum(self.counts(height, width)[: self.private + 1])


def require_tokens(tokens: Tokens, height: int, width: int) -> None:
    """Raise where images of this size cannot be cut into such tokens."""
    rows, columns = tokens.band(height, width, 0)
    if min(rows, columns) < LEAST:
        raise misfit(
            f"tokens.levels is {tokens.levels}, which leaves {rows} x {columns} of an image of "
            f"{height} x {width}; expected at least {LEAST} x {LEAST}",
            "tokens.levels",
            "tokens",
            hint=f"write `levels: {max(0, tokens.levels - 1)}` or less",
        )
    total = sum(tokens.counts(height, width))
    if total > MOST_TOKENS:
        raise misfit(
            f"tokens make {total} tokens of an image of {height} x {width}, more than "
            f"{MOST_TOKENS}",
            "tokens.tokenizer.patches",
            "tokens",
            hint="write larger patches",
        )
