"""How large a run is: compact sizes for two cores, the paper's (Table 9), and tiny ones for a look.

Nothing here was chosen by a private score. `--tune` compares learning rates on public data.
"""

from dataclasses import dataclass, field

PAPER_RATE = 5e-5
# Constraints of the low-B0 backbone (Table 9): B0, l0, decoupled attention, spectral cap.
CONSTRAINED = {"clamp": 16.0, "late": 1, "decoupled": True, "spectral": 1.0}
RATES_FROM = (
    "learning rates of DP-SGD: on codes by `--tune`, letters in the place of the private records, "
    "Fashion-MNIST public, epsilon 1; on pixels round numbers that nothing was chosen by"
)


@dataclass(frozen=True)
class Size:
    """Sizes of one space.

    Args:
        width, depth, patch: of the backbone.
        rate, steps, chunk, draws: of DP-SGD; steps are charged a chunk at a time.
        ema: of DP-SGD's weights.
        prior, distil: steps, batch and learning rate of the public prior and of distillation.
        epochs: of the autoencoder.
        letters: how many glyphs stand beside the public images.
        images: how many are drawn and scored.
        text: of the caption stream; the paper's where it is empty.
        rates: learning rates of DP-SGD by kind of row, "uniform" or "moments".
    """

    width: int
    depth: int
    patch: int
    rate: float
    steps: int
    chunk: int
    draws: int
    ema: float
    prior: tuple[int, int, float]
    distil: tuple[int, int, float]
    epochs: int = 6
    letters: int = 20_000
    images: int = 10_000
    text: dict[str, int] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)


_ONE_WORD = {"width": 16, "length": 1}
COMPACT = {
    "latent": Size(
        48, 2, 8, 0.01, 100, 20, 2, 0.95, (1500, 128, 2e-3), (2000, 128, 2e-3),
        letters=60_000, text=_ONE_WORD,
        rates={"uniform": 1e-2, "moments": 3e-3},
    ),
    "pixel": Size(
        48, 2, 7, 0.01, 100, 20, 1, 0.95, (1500, 128, 2e-3), (1000, 128, 2e-3),
        text=_ONE_WORD, rates={"uniform": 3e-3, "moments": 1e-3},
    ),
}  # fmt: skip
FULL = {
    space: Size(
        192, 6, patch, 0.02, 2000, 200, 4, 0.999, (steps, 256, 1e-4), (3000, 256, 1e-4),
        epochs=20, letters=60_000, rates={"uniform": PAPER_RATE, "moments": PAPER_RATE},
    )
    for space, patch, steps in (("latent", 8, 12_000), ("pixel", 4, 20_000))
}  # fmt: skip
TINY = {
    space: Size(
        16, 1, patch, 0.01, 20, 20, 1, 0.9, (20, 32, 1e-3), (20, 32, 2e-3),
        epochs=1, letters=500, images=1_000, text=_ONE_WORD,
        rates={"uniform": 3e-3, "moments": 1e-3},
    )
    for space, patch in (("latent", 16), ("pixel", 14))
}  # fmt: skip
SIZES = {"compact": COMPACT, "full": FULL, "tiny": TINY}


def text_of(size: Size, words: int) -> dict[str, int]:
    """The caption stream's keys; long enough for captions of so many words."""
    return size.text | {"length": max(size.text["length"], words)} if size.text else {}
