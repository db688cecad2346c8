"""A private record's caption features, and whether they are those that the plan declares."""

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dpsynth.artifacts.rooms import RunDir
from dpsynth.distributed.ranks import ALONE, Ranks
from dpsynth.errors import PlanError, typed
from dpsynth.planning.caption_rules import condition_captions
from dpsynth.planning.captions import FreeCaptions
from dpsynth.planning.schema import Plan
from dpsynth.planning.workload import feature_dim, has_constant
from dpsynth.private.cross import FeaturesOf, Space
from dpsynth.private.encoding import UnitCodes
from dpsynth.public.features import load_features
from dpsynth.public.representation import Representation

# Feature vectors of free captions that are kept: bounds memory, changes no bit of any result.
_KEPT = 4096

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Captioned:
    """How a plan's caption release reads a chunk's captions, and the space it is made in."""

    space: Space
    features_of: FeaturesOf


def load_captioned(
    run: RunDir, plan: Plan, representation: Representation, ranks: Ranks = ALONE
) -> Captioned | None:
    """The caption features of this run's release; None for a plan without one.

    Asked before any charge: processes must agree on the features of public captions, or which
    one holds a unit would matter.

    Args:
        run: its `public/` holds the features.
        plan: declares their length.
        representation: of the release space: codes as released.
        ranks: the processes that hold the records.

    Raises:
        MissingError: `dpsynth pretrain` has not finished.
        PlanError: features of another length than the plan declares, or with another constant.
        RankError: the processes' features differ.
    """
    declared = feature_dim(plan)
    if not declared:
        return None
    features = load_features(run, plan)
    if (features.dim, features.intercept) != (declared, has_constant(plan)):
        raise PlanError(
            f"caption features have {features.dim} numbers, and the plan declares {declared}",
            hint=typed("dpsynth", "pretrain", run.root),
        )
    space = Space(
        representation.dim, declared, representation.radius, features.radius, features.intercept
    )
    table = features.of(condition_captions(plan.private.captions, plan.private.classes))
    digest = hashlib.sha256(table.tobytes()).hexdigest()
    ranks.require_same("the features of the same public captions", digest)
    if not isinstance(plan.private.captions, FreeCaptions):
        return Captioned(space, lambda chunk: table[chunk.labels])

    @lru_cache(_KEPT)
    def one(caption: str) -> Array:
        # By itself, so that no record's features hang on another's.
        found: Array = features.of([caption])[0]
        return found

    def features_of(chunk: UnitCodes) -> Array:
        rows = [one(caption) for caption in chunk.captions or ()]
        return np.array(rows, np.float64).reshape(len(rows), declared)

    return Captioned(space, features_of)
