"""The stages of `pretrain` that a frozen text-to-image prior has in place of public training.

First the model's own samples, which are public images: `public/own-samples/`, an image folder.
Last `prior.safetensors`: what the text encoders say of the plan's prompts, the public mean of
codes, and LoRA factors where the plan trains some. The encoders run once, for these two.
"""

from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from dpsynth.artifacts.files import canonical_json, sha256_bytes
from dpsynth.artifacts.rooms import RunDir
from dpsynth.artifacts.samples import SamplesWriter, read_summary, shard_size
from dpsynth.artifacts.tensors import load_tensors
from dpsynth.console import note, progress
from dpsynth.errors import DpsynthError
from dpsynth.models.autoencoder import as_bytes
from dpsynth.models.flow import euler
from dpsynth.models.frozen.checkpoint import Checkpoint, open_checkpoint
from dpsynth.models.frozen.families import Prompts
from dpsynth.models.frozen.latents import LatentCodec
from dpsynth.models.frozen.prompts import encode_prompts
from dpsynth.models.frozen.stored import build_frozen, save_frozen, stored_prompts, with_factors
from dpsynth.models.frozen.velocity import FrozenVelocity
from dpsynth.models.seeding import generator
from dpsynth.models.velocity import captions_of
from dpsynth.planning.captions import Template
from dpsynth.planning.schema import Plan
from dpsynth.planning.source_kinds import PriorSource
from dpsynth.public.job import refuse_change
from dpsynth.public.own_samples import OWN, own_folder
from dpsynth.public.recipes import PRIOR
from dpsynth.public.representation import Representation

WEIGHTS_KEY = "weights_sha256"
_VERSION = 1
_SEED = 11  # of the public seed's streams: those of the other stages come before
_SHARD = 50
_TEXTS = "texts_sha256"


class FrozenStage:
    """What pretrain makes of a plan's frozen prior, which is opened once."""

    def __init__(self, plan: Plan, run: RunDir) -> None:
        self.plan, self.run = plan, run
        self.found: Checkpoint = open_checkpoint(plan)

    @property
    def facts(self) -> dict[str, str]:
        """What the calibration says of the weights."""
        return {WEIGHTS_KEY: self.found.weights_sha256}

    @property
    def recipe(self) -> list[Any]:
        """What decides the prior's file beside the geometry: declared facts, weights, factors."""
        train = self.plan.stages.train
        lora = train is not None and train.parameters == "lora"
        factors = [train.lora.model_dump(), self.plan.public_seed] if train and lora else []
        return [_VERSION, self.found.family, self.found.weights_sha256, self._texts, *factors]

    def draw_own(self) -> None:
        """Draw the public images of a source of kind prior, unless they are there.

        Interrupted, it goes on after the last whole shard. A shard's noise follows from the public
        seed and its number alone.

        Raises BudgetError: they would change after a charge.
        """
        source = next((one for one in self.plan.public if isinstance(one, PriorSource)), None)
        if source is None:
            return
        folder, origin = own_folder(self.run), self._origin(source.count)
        summary = read_summary(folder)
        if summary is not None and summary["origin"] == origin:
            note("own samples: kept")
            return
        refuse_change(self.run, OWN)
        model, codec = build_frozen(self.plan, self.prompts), LatentCodec.of(self.plan)
        classes, stamp = self.plan.private.classes, {"dpsynth": "public"}
        writer = SamplesWriter(folder, classes, origin=origin, stamp=stamp)
        with progress("own samples of the prior", source.count, completed=writer.written) as bar:
            while writer.written < source.count:
                bar.advance(self._draw_shard(writer, model, codec, source.count))
        writer.finish()

    def _draw_shard(
        self, writer: SamplesWriter, model: FrozenVelocity, codec: LatentCodec, count: int
    ) -> int:
        """Draw and write the next shard; how many images it has."""
        plan, first = self.plan, writer.written
        image, settings = plan.private.image, plan.sampling
        size = shard_size((image.height, image.width, image.channels), _SHARD)
        labels = torch.arange(first, min(count, first + size)) % model.classes
        draws = generator(plan.public_seed + _SEED + (writer.shards << 16))
        codes = euler(
            model,
            torch.randn(len(labels), model.dim, generator=draws),
            labels,
            null=model.classes,
            steps=settings.steps,
            guidance=settings.guidance,
        )
        pixels = codec.decode(codes).clamp(0.0, 1.0).permute(0, 3, 1, 2)
        texts, owners = captions_of(plan), class_owners(plan)
        own = [owners[y] for y in labels.tolist()]
        writer.add(as_bytes(pixels), torch.tensor(own).numpy(), [texts[y] for y in labels.tolist()])
        return len(labels)

    def save_prior(self, representation: Representation, recipe: str, path: Path) -> None:
        """Write `prior.safetensors`."""
        model = build_frozen(self.plan, self.prompts, representation.mean)
        facts = {"recipe": recipe, _TEXTS: self._texts}
        save_frozen(with_factors(model, self.plan), path, room="public", **facts)

    @cached_property
    def prompts(self) -> Prompts:
        """Of the plan's conditions, and the empty one; from the prior's file where it has them."""
        path = self.run.public / PRIOR
        try:
            metadata = load_tensors(path)[1] if path.is_file() else {}
        except DpsynthError:  # damaged: made again
            metadata = {}
        if metadata.get(_TEXTS) == self._texts:
            return stored_prompts(path)
        with progress("prompts: text encoders"):
            return encode_prompts(self.found, prompts_of(self.plan))

    @property
    def _texts(self) -> str:
        """Hash of all prompts, in order."""
        return sha256_bytes(canonical_json({"prompts": prompts_of(self.plan)}))

    def _origin(self, count: int) -> dict[str, Any]:
        settings = self.plan.sampling
        return {
            "model": "frozen prior",
            "version": _VERSION,
            WEIGHTS_KEY: self.found.weights_sha256,
            _TEXTS: self._texts,
            "count": count,
            "image": self.plan.private.image.model_dump(),
            "steps": settings.steps,
            "guidance": settings.guidance,
            "seed": self.plan.public_seed,
        }


def prompts_of(plan: Plan) -> list[str]:
    """The prompt of each condition, and the empty prompt last."""
    prior = plan.frozen
    assert prior is not None
    return [*(prior.prompt_of(caption) for caption in captions_of(plan)), ""]


def class_owners(plan: Plan) -> list[int]:
    """The class of each condition."""
    form = plan.private.captions
    classes = plan.private.classes
    return form.owners(list(classes)) if isinstance(form, Template) else list(range(len(classes)))
