"""Spectral tokens as a task of private training (DP-Wavelet, section 3 and algorithm 1).

The public transformer's coarse part learns the private records' tokens of the scales up to j0.
No other token of a private record is ever computed, and no other weight moves.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpsynth.artifacts.rooms import RunDir
from dpsynth.artifacts.trained import LORA
from dpsynth.errors import PlanError, UsageError
from dpsynth.models.velocity import captions_of
from dpsynth.models.wavelet.adapt import Update, merge, train_coarse
from dpsynth.models.wavelet.autoregressive import (
    Autoregressive,
    coarse_losses,
    drop_captions,
    save_transformer,
)
from dpsynth.planning.schema import Plan
from dpsynth.planning.training import Train
from dpsynth.private.coding import TokenCodes
from dpsynth.private.encoding import UnitCodes
from dpsynth.private.noise import NoiseSource
from dpsynth.private.steps import PrivateCodes, collected
from dpsynth.public.tokens import TokenSpace, load_token_space

_UPDATES: dict[str, Update] = {"all": "full", "attention": "attention", "lora": "lora"}


@dataclass(frozen=True)
class TokenWork:
    """What a step on tokens needs that is declared.

    table: the caption of each label (k, S, ...), where captions are free those of the records;
    null: the empty caption (S, ...), which a dropped one becomes.
    """

    settings: Train
    capacity: int
    table: Tensor
    null: Tensor

    def batch(
        self,
        data: PrivateCodes,
        *,
        rate: float,
        step: int,
        noise: NoiseSource,
        source: torch.Generator,
    ) -> tuple[Tensor, ...]:
        """Ids (B, t) and captions (B, S, ...) of a Poisson batch: each unit by a coin of its own.

        Of units of several images, ids (B, M, t) and captions (B, M, S, ...) of M = `multiplicity`
        of them. Captions are dropped image by image. All steps are alike.
        """
        del step
        ids, labels = data.sampled(noise, rate, self.settings.multiplicity, source)
        text = self.table[labels].flatten(0, labels.ndim - 1)
        dropout = self.settings.label_dropout
        text = drop_captions(text, self.null.expand_as(text), dropout, source)
        return ids, text.view(*labels.shape, *self.null.shape)


@dataclass
class TokenTask:
    """See `task.Task`."""

    plan: Plan
    space: TokenCodes
    model: Autoregressive
    work: TokenWork
    facts: dict[str, str]

    losses = staticmethod(coarse_losses)

    @classmethod
    def load(cls, run: RunDir, plan: Plan) -> "TokenTask":
        """From the run's public transformer.

        Raises:
            MissingError: `dpsynth pretrain` has not finished.
            PlanError: no train stage, or weights that tokens do not have.
            UsageError, ReplayError: the public files, or the sentence encoder, are not those that
                the calibration names.
        """
        return cls.of(plan, load_token_space(run, plan))

    @classmethod
    def of(cls, plan: Plan, space: TokenSpace) -> "TokenTask":
        """The plan's training of a space's transformer, which is changed."""
        settings = plan.stages.train
        if settings is None:
            raise PlanError("this plan has no train stage", hint="declare stages.train and re-plan")
        update, lora = _UPDATES.get(settings.parameters), settings.lora
        if update is None:
            raise PlanError(
                f"stages.train.parameters: {settings.parameters} is nothing that tokens have",
                hint="write all, attention or lora",
            )
        if space.dim != space.transformer.coarse.stop:
            raise UsageError(
                f"{space.dim} tokens are private, and the transformer's coarse part predicts "
                f"{space.transformer.coarse.stop}"
            )
        model = train_coarse(
            space.transformer, update, rank=lora.rank, scale=lora.scale, seed=plan.public_seed
        )
        table = space.text_of(captions_of(plan))
        work = TokenWork(settings, plan.private.capacity, table, model.null(table[:1])[0])
        facts = {LORA: repr(lora.scale / lora.rank)} if update == "lora" else {}
        return cls(plan, TokenCodes(space), model, work, facts)

    def take(self, chunks: Iterable[UnitCodes]) -> PrivateCodes:
        """Units' private tokens in memory; free captions become rows of the table, in no file."""
        data = collected(chunks, lambda chunk: torch.from_numpy(chunk.codes).long())
        if data.captions is not None:
            self.work = replace(self.work, table=self.space.space.text_of(data.captions))
        return data

    def trial(self) -> None:
        """See `Task`: the transformer is dpsynth's own."""

    def save(self, model: nn.Module, path: Path) -> None:
        """Write the whole transformer, LoRA factors merged: the coarse part private, the fine not.

        Raises UsageError for another model.
        """
        if not isinstance(model, Autoregressive):
            raise UsageError(f"{type(model).__name__} is no transformer over tokens")
        save_transformer(merge(model), path, room="released")

    def report(self) -> dict[str, Any]:
        """How many tokens of an image were private, and which weights moved."""
        return {"private_tokens": self.space.dim, "parameters": self.work.settings.parameters}
