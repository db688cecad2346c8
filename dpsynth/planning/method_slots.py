"""Slots of the stages that other methods have: an embedding, vote rounds, central images."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from dpsynth.accounting.queries import EmbeddingSums
from dpsynth.accounting.statistics import Statistic
from dpsynth.planning.central import NAME as CENTRAL
from dpsynth.planning.embedding import Embedding

if TYPE_CHECKING:
    from dpsynth.planning.schema import Plan

EMBEDDING = "embedding"
"""Name of the embedding's one release, and of its file."""

Draft = tuple[str, str, Statistic, float, float | None, int | None, bool]
"""Stage, name, statistic, share of the stage's 1/sigma^2, rate, steps, whether it is a spare."""


def method_slots(plan: "Plan", multipliers: Mapping[str, float]) -> Iterator[Draft]:
    """The slots of those stages that `multipliers` names, in the order in which they are spent."""
    yield from _whole(plan, multipliers)
    central = plan.stages.central
    if central is not None and "central" in multipliers:
        statistic = central.statistic(len(plan.private.classes), plan.representation.code)
        for name in _with_spares(CENTRAL, central.spares):
            spare = name != CENTRAL
            yield "central", name, statistic, 1.0, central.rate, central.images, spare


def _whole(plan: "Plan", multipliers: Mapping[str, float]) -> Iterator[Draft]:
    """Stages that are a method by themselves."""
    embedding, votes = plan.stages.embedding, plan.stages.votes
    if embedding is not None and "embedding" in multipliers:
        found = embedding_statistic(plan, embedding)
        for name in _with_spares(EMBEDDING, embedding.spares):
            yield "embedding", name, found, 1.0, None, None, name != EMBEDDING
    if votes is not None and "votes" in multipliers:
        rounds = votes.releases(len(plan.private.classes))
        for name, histogram, share in rounds:
            yield "votes", name, histogram, share, None, None, False
        for number in range(1, votes.spares + 1):
            for name, histogram, share in rounds:
                spare = f"{name}-spare-{number}"
                yield "votes", spare, histogram, share, None, None, True


def embedding_statistic(plan: "Plan", embedding: Embedding) -> EmbeddingSums:
    """What the embedding stage releases: its weights by the declared shares (E1)."""
    image = plan.private.image
    a, b = embedding.blocks.weights()
    return EmbeddingSums(
        count=a,
        sum=b,
        classes=len(plan.private.classes),
        dim=embedding.dim(image.height, image.width, image.channels),
    )


def method_draws(plan: "Plan") -> Iterator[tuple[Statistic, int | None]]:
    """Statistic and steps of every slot of those stages, spares too: for delta_slack (A8, Z4)."""
    every = dict.fromkeys(("embedding", "votes", "central"), 1.0)
    for _, _, statistic, _, _, steps, _ in method_slots(plan, every):
        yield statistic, steps


def _with_spares(name: str, spares: int) -> Iterator[str]:
    yield name
    yield from (f"{name}-spare-{number}" for number in range(1, spares + 1))
