"""What of a plan spends budget: its stages, and which of them make sense together."""

from pydantic import model_validator

from dpsynth.planning.central import Central
from dpsynth.planning.embedding import Embedding
from dpsynth.planning.evolution import Evolution
from dpsynth.planning.release import EvaluationRelease, Moments
from dpsynth.planning.section import Section, later, misfit
from dpsynth.planning.training import Train

_WHOLE = {"embedding": "a generator is fitted to it", "votes": "samples are its last population"}
"""Stages that are a method by themselves, and why nothing could use another one's release."""


class Stages(Section):
    """What spends budget, in the order in which it is spent. An absent stage is inactive.

    `moments`: a release of moments. `embedding`: a mean embedding, that a generator is fitted to.
    `votes`: rounds of votes for populations of a public generator. `central`: central images, that
    training starts from. `train`: DP-SGD. `evaluation`: a confusion matrix of held-out records.
    """

    moments: Moments | None = None
    embedding: Embedding | None = later(None)
    votes: Evolution | None = later(None)
    central: Central | None = later(None)
    train: Train | None = None
    evaluation: EvaluationRelease | None = later(None)

    @model_validator(mode="after")
    def _some_stage(self) -> "Stages":
        if not any((self.moments, self.train, self.embedding, self.votes, self.central)):
            raise ValueError("declare at least one stage: moments, train, embedding, votes")
        return self

    @model_validator(mode="after")
    def _make_sense_together(self) -> "Stages":
        learning = [name for name in (*_WHOLE, "moments", "central", "train") if self._has(name)]
        for name in (name for name in _WHOLE if self._has(name)):
            others = [other for other in learning if other != name]
            if others:
                raise misfit(
                    f"{name} is a method by itself ({_WHOLE[name]}), and nothing would use "
                    f"{' and '.join(others)}",
                    others[0],
                    hint=f"remove `{others[0]}`, or let a line `method: ...` at the top level "
                    "choose (docs/methods.md)",
                )
        if self.central is not None and self.train is None:
            raise misfit(
                "central images are what training starts from, and there is no train",
                "central",
                hint="add `train: {rate: 0.02, steps: 500}` under `stages:`",
            )
        if self.central is not None and self.moments is not None:
            raise misfit(
                "central and moments are two starts of one training",
                "central",
                hint="remove `central` or `moments`, or let a line `method: ...` at the top level "
                "choose (docs/methods.md)",
            )
        return self

    def _has(self, name: str) -> bool:
        return getattr(self, name) is not None
