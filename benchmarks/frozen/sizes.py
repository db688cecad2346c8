"""How large the small prior is, and how long it is trained."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """The prior's numbers; `tiny` is for a look at whether all of it runs."""

    side: int = 32
    channels: int = 16
    """Of the latents."""
    widths: tuple[int, ...] = (16, 32)
    """Of the autoencoder's levels; each but the first halves the image's sides."""
    heads: int = 3
    head: int = 32
    layers: int = 3
    clothes: int = 12_000
    images: int = 16
    rebuilding: int = 1_000
    batch: int = 32
    steps: int = 1_000
    """Of the transformer."""
    own: int = 200
    """Samples of its own that the prior is calibrated by."""
    records: int = 2_040
    drawn: int = 100
    """Samples that each mean is measured by."""
    euler: int = 10
    probing: int = 800
    """Training steps of the classifier that looks at samples."""

    @property
    def width(self) -> int:
        """Of the transformer.

        >>> Size().width
        96
        """
        return self.heads * self.head

    @property
    def latent(self) -> tuple[int, int, int]:
        """Channels, height and width.

        >>> Size().latent
        (16, 16, 16)
        """
        side = self.side // 2 ** (len(self.widths) - 1)
        return self.channels, side, side


COMPACT = Size()
TINY = Size(
    side=16,
    channels=4,
    widths=(4, 8, 8),
    heads=2,
    head=8,
    layers=1,
    clothes=400,
    images=8,
    rebuilding=4,
    batch=8,
    steps=4,
    own=16,
    records=40,
    drawn=20,
    euler=3,
    probing=5,
)
SIZES = {"compact": COMPACT, "tiny": TINY}
