"""The stages of `pretrain` that make spectral tokens: the tokenizer, then the transformer.

DP-Wavelet, sections 2.3 and 3: both learn from public images and their captions alone. Images are
taken as they are: unlike a code space, tokens must not learn turned or deformed images, which the
public transformer would draw.
"""

import math
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from dpsynth.artifacts.files import sha256_file, write_json
from dpsynth.artifacts.tensors import load_tensors
from dpsynth.console import note, progress
from dpsynth.models.velocity import captions_of
from dpsynth.models.wavelet.autoregressive import Autoregressive, load_transformer
from dpsynth.models.wavelet.stored import load_tokenizer
from dpsynth.models.wavelet.tokenizer import Tokenizer
from dpsynth.planning.captions import FreeCaptions
from dpsynth.planning.schema import Plan
from dpsynth.public.job import FORMAT, Job
from dpsynth.public.kept import kept_calibration, made_by
from dpsynth.public.token_captions import ENCODER_KEY, caption_reader, encoder_sha256
from dpsynth.public.tokenizer import (
    SHEET,
    TOKENIZER,
    TokenizerTraining,
    curve_of,
    pretrain_tokenizer,
    report,
    show_scales,
    some,
    some_rows,
)
from dpsynth.public.tokens import (
    TRANSFORMER,
    ids_of,
    settings_of,
    sizes_of,
    token_files,
    tokens_of,
)
from dpsynth.public.transformer import Pairs, losses_by_token, pretrain_transformer

_VERSION = 1  # part of the recipes: raise it when the same settings give other tokens
_SHOWN, _PAIRS = 8, 1_024


def token_stages(job: Job) -> None:
    """Make tokenizer, transformer and sheet, or keep what is there.

    Raises:
        BudgetError: a file would change after a charge.
        UsageError: two conditions read alike to the transformer.
        MissingError, DataError, PlanError: its sentence encoder is not there, or does not fit.
    """
    plan, room, seed = job.plan, job.run.public, job.plan.public_seed
    if not isinstance(plan.private.captions, FreeCaptions):
        caption_reader(tokens_of(plan).transformer).require_distinct(captions_of(plan))
    tokenizer = pretrain_tokenizer(
        room / TOKENIZER,
        job.public.images,
        settings_of(plan),
        _training(job),
        seed=seed + 6,
        recipe=_tokenizer_recipe(job),
        stale=job.stale,
    )
    show_scales(tokenizer, some(job.public.images, seed, _SHOWN), room / SHEET)
    _transformer_stage(job, tokenizer)


def token_recipes(job: Job) -> dict[str, str]:
    """The recipe of each file; `TOKENIZER` must be there. Empty for a plan without tokens."""
    if job.plan.tokens is None:
        return {}
    return {TOKENIZER: _tokenizer_recipe(job), TRANSFORMER: _transformer_recipe(job)}


def token_facts(job: Job) -> dict[str, Any]:
    """What the calibration says of the tokens, of at most 4,096 public images.

    counts: tokens by scale; private: how many of them private training sees. losses: nats a token,
    `parts` at the end of training (coarse and fine, or all), `scales` afterwards on 1,024 public
    pairs, `uniform` for guessing. The rest: see `public.tokenizer.report`.
    """
    if job.plan.tokens is None:
        return {}
    room, image = job.run.public, job.plan.private.image
    with progress("calibration: tokens", 1) as bar:
        tokenizer, _ = load_tokenizer(room / TOKENIZER, settings_of(job.plan))
        facts = {
            "counts": [scale.tokens for scale in tokenizer.layout.scales],
            "private": tokens_of(job.plan).private_tokens(image.height, image.width),
            **report(tokenizer, some(job.public.images, job.plan.public_seed)),
            "losses": _losses(job, tokenizer),
            "curve": curve_of(room / TOKENIZER),
        }
        bar.advance()
    sha256 = encoder_sha256(tokens_of(job.plan).transformer)
    return {"tokens": facts} if sha256 is None else {"tokens": facts, ENCODER_KEY: sha256}


def pretrain_tokens(job: Job) -> dict[str, Any]:
    """The whole public room of a plan whose representation is tokens; return the calibration.

    Raises:
        BudgetError: the result would change after a charge.
    """
    if (finished := _finished(job)) is not None:
        note("public room: all there already")
        return finished
    token_stages(job)
    hashes = _hashes(job)
    recipe = _calibration_recipe(job, *hashes.values())
    if (kept := kept_calibration(job.run, recipe)) is not None:
        note("calibration: kept")
        return kept
    job.stale(job.run.calibration)
    facts = {
        "format": FORMAT,
        "recipe": recipe,
        **token_facts(job),
        "dim": job.plan.representation.code,
        **hashes,
        "sources": [source.to_json() for source in job.public.sources],
    }
    write_json(job.run.calibration, facts)
    return facts


def image_captions(job: Job) -> list[str]:
    """A caption of each public image: its own where the sources have any, empty for the others.

    Else that of a condition of the plan: public labels are taken modulo their number, as the
    velocity prior does. A private class then starts from some public class.
    """
    if job.public.captions is not None:
        return list(job.public.captions)
    conditions = captions_of(job.plan)
    return [conditions[label % len(conditions)] for label in job.public.labels.tolist()]


def _transformer_stage(job: Job, tokenizer: Tokenizer) -> None:
    plan, path, recipe = job.plan, job.run.public / TRANSFORMER, _transformer_recipe(job)
    if made_by(path, recipe):
        note("transformer: kept")
        return
    job.stale(path)
    images = job.public.images
    with progress("transformer: tokens of public images", len(images)) as bar:
        ids = ids_of(tokenizer, images, bar.advance)
    pretrain_transformer(
        path,
        Pairs(ids, _read(plan, image_captions(job))),
        sizes_of(plan),
        plan.pretraining,
        seed=plan.public_seed + 7,
        recipe=recipe,
    )


def _read(plan: Plan, captions: list[str]) -> Tensor:
    """Public captions (n, ...) as the transformer reads them."""
    reader = caption_reader(tokens_of(plan).transformer)
    if reader.encoder is None:
        return reader(captions)
    with progress("transformer: captions of public images", len(set(captions))) as bar:
        return reader(captions, bar.advance)


def _training(job: Job) -> TokenizerTraining:
    made = tokens_of(job.plan).tokenizer
    return TokenizerTraining(
        steps=made.steps,
        batch=made.batch,
        learning_rate=made.learning_rate,
        decay=made.decay,
        emphasis=made.emphasis,
    )


def _tokenizer_recipe(job: Job) -> str:
    settings, training = asdict(settings_of(job.plan)), asdict(_training(job))
    return job.recipe("tokenizer", _VERSION, settings, training)


def _transformer_recipe(job: Job) -> str:
    plan = job.plan
    made = sizes_of(plan)
    sizes = asdict(made) | {"text": made.text.model_dump()}
    # Captions that images have of their own are part of each recipe already.
    words = captions_of(plan) if job.public.captions is None else None
    parts = (sizes, plan.pretraining.model_dump(), words, sha256_file(job.run.public / TOKENIZER))
    sha256 = encoder_sha256(tokens_of(plan).transformer)
    return job.recipe("transformer", _VERSION, *parts, *([] if sha256 is None else [sha256]))


def _calibration_recipe(job: Job, *hashes: str) -> str:
    return job.recipe("calibration", "tokens", _VERSION, job.plan.representation.code, *hashes)


def _hashes(job: Job) -> dict[str, str]:
    return {key: sha256_file(job.run.public / n) for key, n in token_files(job.plan).items()}


def _finished(job: Job) -> dict[str, Any] | None:
    """The calibration, when every file of the room is there and made by this recipe."""
    room = job.run.public
    if not all((room / name).exists() for name in (TOKENIZER, TRANSFORMER, SHEET)):
        return None
    if not all(made_by(room / name, recipe) for name, recipe in token_recipes(job).items()):
        return None
    return kept_calibration(job.run, _calibration_recipe(job, *_hashes(job).values()))


def _losses(job: Job, tokenizer: Tokenizer) -> dict[str, Any]:
    path = job.run.public / TRANSFORMER
    transformer: Autoregressive = load_transformer(path, sizes_of(job.plan))[0]
    rows = some_rows(len(job.public.images), job.plan.public_seed, _PAIRS)
    captions = image_captions(job)
    text = _read(job.plan, [captions[row] for row in rows])
    found = losses_by_token(transformer, Pairs(ids_of(tokenizer, job.public.images[rows]), text))
    ends = [tokenizer.layout.coarse(s) for s in range(len(tokenizer.layout.scales))]
    scales = torch.tensor_split(found, ends[:-1])
    parts = load_tensors(path)[1].get("losses", "").split()
    return {
        "parts": [float(part) for part in parts],
        "scales": [float(part.mean()) for part in scales],
        "uniform": math.log(tokenizer.settings.codebook),
    }
