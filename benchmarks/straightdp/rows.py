"""Which rows each table has, and at which epsilons and seeds."""

from dataclasses import dataclass, replace

from benchmarks.straightdp.plans import Row
from benchmarks.straightdp.sizes import CONSTRAINED, PAPER_RATE

EPSILONS = (0.3, 1.0, 3.0)
LOW_B0 = tuple(CONSTRAINED)


@dataclass(frozen=True)
class Cell:
    """One run: a row at an epsilon, by number. `label`: the row's name in this table."""

    row: Row
    epsilon: float
    number: int
    label: str = ""

    @property
    def name(self) -> str:
        """What the table calls the row."""
        return self.label or self.row.name


def training_rows(space: str) -> list[Row]:
    """The five rows of a space in Table 1."""
    return [
        Row(f"{space}: uniform", space, release=None, train="uniform"),
        Row(f"{space}: planned", space, release=None),
        Row(f"{space}: uniform + moments", space, train="uniform"),
        Row(f"{space}: planned + moments", space),
        Row(f"{space}: + low B0", space, constraints=LOW_B0),
    ]


PIXEL, LATENT = training_rows("pixel"), training_rows("latent")
# The release taught for all t, not up to the public knee: better on letters (`plans/`).
ALL_T = Row("latent: planned + moments, all t", "latent", horizon=1.0)
SAMPLED = Row("release sampled", "latent", train=None, port="sample")
GUIDED = Row("prior + guidance", "latent", train=None, port="guide")
TABLE_1 = [SAMPLED, GUIDED, *PIXEL, *LATENT]

# By their names in Table 2; the ends are rows of Table 1.
TABLE_2 = {
    "unconstrained": PIXEL[3],
    "late injection": Row("pixel: late injection", "pixel", constraints=("late",)),
    "stream clamp": Row("pixel: stream clamp", "pixel", constraints=("clamp",)),
    "full backbone": PIXEL[4],
}

_SLOTS = Row("captions: slots", "pixel", release="slots", data="captioned")
_UNCENTRED = {"features": "slots", "centre": False, "intercept": False}
# The class release is the one-hot case; the ablations are one run each, as in the paper.
TABLE_4 = {
    "one-hot class (reference)": PIXEL[3],
    "per-slot indicators": _SLOTS,
    "without projection": replace(
        _SLOTS, name="captions: no projection", changes=(("projection", None),), runs=1
    ),
    "without centring or intercept": replace(
        _SLOTS, name="captions: no centring", changes=(("captions", _UNCENTRED),), runs=1
    ),
    "composed: one-hot": Row("composed: one-hot", "pixel", release="one-hot", data="composed"),
    "composed: per-slot indicators": Row(
        "composed: slots", "pixel", release="slots", data="composed"
    ),
}
SENTENCE = "pooled text encoder"

# Not in the paper: does a gradient stage help a stronger release, at an equal total budget?
GRADIENT = [
    Row("class moments alone", "latent", release="class", train=None, port="sample"),
    Row("class moments + DP-SGD", "latent", release="class", train="uniform", share=0.5),
    Row("cells alone", "latent", release="cells", train=None, port="sample"),
    Row("cells + DP-SGD", "latent", release="cells", train="uniform", share=0.5),
    Row("uniform, the paper's rate", "latent", release=None, train="uniform", rate=PAPER_RATE),
    Row("planned + moments, the paper's rate", "latent", rate=PAPER_RATE),
    ALL_T,
    Row("guided, not distilled", "latent", port="guide"),
    Row("distilled and guided", "latent", port="both"),
]

Named = dict[str, Row]


def named(rows: list[Row]) -> Named:
    """Rows by their own names."""
    return {row.name: row for row in rows}


def cells(rows: Named, epsilons: tuple[float, ...], *, full: bool) -> list[Cell]:
    """Three runs at epsilon 1 and one elsewhere; three everywhere with `full`."""
    return [
        Cell(row, epsilon, number, label)
        for label, row in rows.items()
        for epsilon in epsilons
        for number in range(row.runs or (3 if full or epsilon == 1.0 else 1))
    ]


def table(name: str, *, full: bool, encoder: str | None = None) -> list[Cell]:
    """The runs that a table needs; those of several tables are the same runs.

    `encoder`: of Table 4's pooled text encoder, which is left out without one.

    Raises:
        KeyError: no table of that name.
    """
    captions = TABLE_4 | (sentence_rows(encoder) if encoder else {})
    asked: dict[str, tuple[Named, tuple[float, ...]]] = {
        "1": (named(TABLE_1), EPSILONS),
        "2": (TABLE_2, (0.3,)),
        "4": (captions, (1.0,)),
        "5": (named([SAMPLED, *PIXEL]), (1.0,)),
        "7": (named([*PIXEL, *LATENT]), EPSILONS),
        "gradient": (named(GRADIENT), (1.0, 3.0)),
    }
    found = cells(*asked[name], full=full)
    if name == "2":  # right half: the sweep over epsilon
        pair = {label: TABLE_2[label] for label in ("unconstrained", "full backbone")}
        found += cells(pair, (0.5, 1.0, 3.0), full=full)
    return found


def sentence_rows(encoder: str) -> Named:
    """Table 4's pooled text encoder: on MNIST with captions, and on composed digits."""
    changes = (("captions", {"features": "sentence", "encoder": encoder}),)
    return {
        SENTENCE: Row("captions: sentence", "pixel", "sentence", data="captioned", changes=changes),
        f"composed: {SENTENCE}": Row(
            "composed: sentence", "pixel", "sentence", data="composed", changes=changes
        ),
    }


def every_row() -> Named:
    """All rows but those of a text encoder, by their own names."""
    known = [*TABLE_1, *TABLE_2.values(), *TABLE_4.values(), *GRADIENT]
    return named(known)
