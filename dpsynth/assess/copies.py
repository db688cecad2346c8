"""The copy check: are samples nearer to private training records than chance would have them?

Each sample's score is its distance to the nearest training record over that to the nearest
held-out record: a ratio, since smooth or odd images are near to, or far from, all records alike
(the idea of the three-sample test of Meehan, Chaudhuri and Dasgupta 2020). What scores are like
without any copying is told by held-out records in the samples' place, each without itself.
Curator-only: everything here shows or measures private records.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import betabinom, binomtest, fisher_exact

from dpsynth.artifacts.sheet import side_by_side
from dpsynth.assess.nearest import Images, Space, nearest
from dpsynth.errors import UsageError
from dpsynth.models.seeding import generator

Scores = NDArray[np.float64]

CLOSE = 0.01
"""Share of held-out records that count as close, by the definition of the threshold."""
LEVEL = 0.01
"""Chance of a false alarm that is aimed at, over all spaces together."""
CONFIDENCE = 0.95
FEWEST = 100
"""Held-out records below which nothing is judged."""
TAIL = 0.02
NULL, LEFT_OUT = 4_000, 2_000
"""Most held-out records, and most training records, that stand in the samples' place."""
PROTOCOL = (
    "score: distance to the nearest training record over that to the nearest held-out record, all "
    "pairs; copies: below every held-out record's own score, and fewer than 0.01 such samples "
    "expected by a power law through the lowest 2% of those; closer: more samples below their 1% "
    "quantile than chance allows (beta-binomial), and more than among training records left out "
    "one by one (Fisher); level 0.01 over all spaces; held-out records must be drawn as training "
    "records are"
)
CLEAN, CLOSER, COPIES, UNJUDGED = "clean", "closer", "copies", "not judged"
LEGEND = (
    "beside each row: the space that is compared in, and the sample's score there:\n"
    "its distance to the nearest training record / to the nearest held-out record.\n"
    "Lower is nearer to training; about 1 is as near to both."
)
WORDS = {
    CLEAN: "no sample is nearer to a training record than held-out records make expected",
    CLOSER: "samples are near to training records more often than held-out records are",
    COPIES: "samples copy training records: nearer than any held-out record lies by chance",
    UNJUDGED: f"not judged: there are fewer than {FEWEST} held-out records",
}


@dataclass(frozen=True, eq=False)
class Found:
    """One space's answer.

    Attributes:
        space: its name.
        verdict: one of the keys of `WORDS`.
        score: of each sample (n,), see the module.
        train: index of each sample's nearest training record (n,).
        held_out: index of its nearest held-out record (n,).
        distance: to that training record (n,).
        null: scores of held-out records in the samples' place, sorted.
        left_out: scores of training records in the samples' place, each without itself.
        twins: held-out records that equal a training record; `null` leaves them out.
        threshold: scores below it are close.
        expected: share of samples that are close by chance.
        p_value: chance of as many close samples as there are, or more, without copying: the larger
            of the two tests' in `copy_check`.
        copies: samples (k,) that are too near for chance, nearest first.
    """

    space: str
    verdict: str
    score: Scores
    train: NDArray[np.int64]
    held_out: NDArray[np.int64]
    distance: Scores
    null: Scores
    left_out: Scores
    twins: int
    threshold: float
    expected: float
    p_value: float
    copies: NDArray[np.int64]

    @property
    def short(self) -> str:
        """The space's name without what stands in brackets: "lenet-84"."""
        return self.space.split(" (")[0]

    @property
    def close(self) -> int:
        """How many samples are close."""
        return int((self.score < self.threshold).sum())

    @property
    def interval(self) -> tuple[float, float]:
        """Clopper-Pearson interval of the share of close samples, at `CONFIDENCE`."""
        found = binomtest(self.close, len(self.score)).proportion_ci(CONFIDENCE, "exact")
        return float(found.low), float(found.high)

    def to_json(self) -> dict[str, Any]:
        """Plain values; the shares are None where nothing is judged."""
        judged = self.verdict != UNJUDGED
        return {
            "space": self.space,
            "verdict": self.verdict,
            "n_samples": len(self.score),
            "n_null": len(self.null),
            "copies": len(self.copies),
            "copied_samples": self.copies[:100].tolist(),
            "close_share": self.close / len(self.score) if judged else None,
            "interval": list(self.interval) if judged else None,
            "expected_share": self.expected if judged else None,
            "training_share": float(np.mean(self.left_out < self.threshold)) if judged else None,
            "p_value": self.p_value if judged else None,
            "threshold": self.threshold if judged else None,
            "least_score": float(self.score.min()),
            "least_held_out_score": float(self.null[0]) if len(self.null) else None,
            "median_score": float(np.median(self.score)),
            "median_held_out_score": float(np.median(self.null)) if len(self.null) else None,
            "held_out_equal_to_training": self.twins,
        }


@dataclass(frozen=True, eq=False)
class CopyCheck:
    """All spaces' answers. `exact`: samples equal to a training record and to no held-out one."""

    spaces: tuple[Found, ...]
    exact: int

    @property
    def verdict(self) -> str:
        """The worst of the spaces' verdicts."""
        verdicts = {found.verdict for found in self.spaces}
        if self.exact:
            return COPIES
        return next(v for v in (COPIES, CLOSER, UNJUDGED, CLEAN) if v in verdicts)

    def to_json(self) -> dict[str, Any]:
        """Plain values, with the verdict in words."""
        return {
            "verdict": self.verdict,
            "words": WORDS[self.verdict],
            "exact_copies": self.exact,
            "confidence": CONFIDENCE,
            "spaces": [found.to_json() for found in self.spaces],
        }


def copy_check(
    samples: Images,
    train: Images,
    held_out: Images,
    spaces: Sequence[Space],
    progress: Callable[[int], None] | None = None,
) -> CopyCheck:
    """Compare samples with private records in each of `spaces`.

    Two tests a space. *Copies*: single samples whose score is below every held-out record's, and
    so low that the tail of those, continued as a power law (Hill 1975), makes fewer than `LEVEL`
    such samples expected among all. *Closer*: the share of samples below the held-out scores' 1%
    quantile is larger than chance allows (beta-binomial tail: both sides exchangeable), and also
    larger than among training records, each without itself (Fisher's exact test), so that held-out
    records which are merely unlike the training records raise no alarm. `LEVEL` is divided by the
    number of spaces.

    Held-out records must be drawn as the training records are; a split by hash does that. Where a
    data set has near-duplicates of its own, look at the pairs: real images may be such copies too.

    Args:
        samples: uint8 (n, H, W, C).
        train: all private training records, uint8 (m, H, W, C): a copy of one that is left out
            cannot be seen.
        held_out: uint8 (k, H, W, C).
        spaces: such as `nearest.pixel_space`, `nearest.aligned_space`, and features.
        progress: called with the number of pairs compared, of `pairs` in all for each space.

    Raises:
        UsageError: no sample, no space, fewer than two records on a side, or other shapes.
    """
    if not len(samples) or not spaces or min(len(train), len(held_out)) < 2:
        raise UsageError(
            f"the copy check was given {len(samples)} samples and {len(spaces)} spaces, or fewer "
            "than two records on a side of the split; it needs some of each"
        )
    found = [
        _checked(samples, train, held_out, space, level=LEVEL / len(spaces), progress=progress)
        for space in spaces
    ]
    known = {image.tobytes() for image in train} - {image.tobytes() for image in held_out}
    return CopyCheck(tuple(found), sum(image.tobytes() in known for image in samples))


def pairs(samples: int, train: int, held_out: int) -> int:
    """How many pairs one space compares: the total of its progress."""
    asked = samples + min(NULL, held_out) + min(LEFT_OUT, train)
    return asked * (train + held_out)


def closest_pairs(
    check: CopyCheck,
    samples: Images,
    train: Images,
    held_out: Images,
    path: Path,
    *,
    title: str,
    public: bool = False,
    rows: int = 8,
) -> Path:
    """Draw each space's lowest scores: sample, nearest training record, nearest held-out record.

    Under the title stands what a score is; each row bears its space and its score. Unless all
    records are `public`, `path` lies in the curator's room and is closed to others.
    """
    drawn = []
    for found in check.spaces:
        for i in np.argsort(found.score, kind="stable")[:rows].tolist():
            near = (samples[i], train[found.train[i]], held_out[found.held_out[i]])
            drawn.append((f"{found.short}: {found.score[i]:.2f}", [one[None] for one in near]))
    headings = ["sample", "training", "held out"]
    stamp = {"dpsynth": "public" if public else "curator-only"}
    side_by_side(drawn, headings, path, f"{title}\n{LEGEND}", stamp)
    if not public:
        path.chmod(0o600)
    return path


def _checked(
    samples: Images,
    train: Images,
    held_out: Images,
    space: Space,
    *,
    level: float,
    progress: Callable[[int], None] | None,
) -> Found:
    """One space: scores of samples, of held-out records, and of training records left out."""
    null, left = _some(len(held_out), NULL), _some(len(train), LEFT_OUT)
    asked = np.concatenate([samples, held_out[null], train[left]])
    nobody = np.full(len(samples), -1, np.int64)
    mine = np.concatenate([nobody, np.full(len(null), -1), left])
    theirs = np.concatenate([nobody, null, np.full(len(left), -1)])
    to_train = nearest(asked, train, space, own=mine, progress=progress)
    to_held_out = nearest(asked, held_out, space, own=theirs, progress=progress)
    scores = _ratio(to_train.distance, to_held_out.distance)
    n, m = len(samples), len(samples) + len(null)
    own = scores[n:m]
    twins = to_train.distance[n:m] == 0
    nulls = np.sort(own[~twins])
    judged = _judged(scores[:n], nulls, scores[m:], level) if len(nulls) >= FEWEST else None
    verdict, threshold, expected, p_value, copies = judged or (
        UNJUDGED, float("nan"), float("nan"), float("nan"), np.empty(0, np.int64)
    )  # fmt: skip
    return Found(
        space.name,
        verdict,
        scores[:n],
        to_train.index[:n],
        to_held_out.index[:n],
        to_train.distance[:n],
        nulls,
        scores[m:],
        int(twins.sum()),
        threshold,
        expected,
        p_value,
        copies,
    )


def _judged(
    scores: Scores, null: Scores, left_out: Scores, level: float
) -> tuple[str, float, float, float, NDArray[np.int64]]:
    """Verdict, threshold, expected share, p-value, and the samples that are copies."""
    rank = max(1, round(CLOSE * (len(null) + 1)))
    threshold = float(null[rank - 1])
    close = int((scores < threshold).sum())
    # Among exchangeable scores, those below the rank-th of m are beta-binomial.
    chance = float(betabinom.sf(close - 1, len(scores), rank, len(null) + 1 - rank))
    theirs = int((left_out < threshold).sum())
    table = [[close, len(scores) - close], [theirs, len(left_out) - theirs]]
    p_value = max(chance, float(fisher_exact(table, alternative="greater").pvalue))
    copies = _copies(scores, null, level)
    verdict = COPIES if len(copies) else CLOSER if p_value < level else CLEAN
    return verdict, threshold, rank / (len(null) + 1), p_value, copies


def _copies(scores: Scores, null: Scores, level: float) -> NDArray[np.int64]:
    """Samples (k,), nearest first, whose scores the null's lower tail does not explain.

    Below the tail's end r0, P(score < r) = P(score < r0) (r / r0)^a, with Hill's estimator of a
    (Hill 1975, eq. 2.7; in distances that is Levina and Bickel's estimator of dimension) less two
    of its standard errors, a / sqrt(points): rounded towards no alarm.
    """
    points = max(20, round(TAIL * len(null)))
    end = null[points]
    if end == 0:
        return np.empty(0, np.int64)
    tail = np.maximum(null[:points], np.finfo(float).tiny)
    exponent = points / max(float(np.log(end / tail).sum()), 1e-9) * (1 - 2 / np.sqrt(points))
    expected = len(scores) * points / len(null) * np.minimum(scores / end, 1.0) ** exponent
    order = np.argsort(scores, kind="stable")
    found: NDArray[np.int64] = order[(expected < level)[order] & (scores < null[0])[order]]
    return found


def _ratio(own: Scores, other: Scores) -> Scores:
    """`own` / `other` (n,); 1 where both are 0."""
    found = np.full(len(own), np.inf)
    np.divide(own, other, out=found, where=other > 0)
    found[(own == 0) & (other == 0)] = 1.0
    return found


def _some(count: int, most: int) -> NDArray[np.int64]:
    """A fixed random choice of at most `most` of `count`."""
    return torch.randperm(count, generator=generator(0)).numpy()[:most]
