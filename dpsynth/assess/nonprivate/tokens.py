"""References of plans with spectral tokens: drawn, completed by the public transformer, decoded.

As a plan's own samples are (DP-Wavelet, algorithm 2), so that the two can be compared whole.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpsynth.assess.nonprivate.flows import Pictures
from dpsynth.assess.nonprivate.learning import trained
from dpsynth.assess.nonprivate.room import Place, load_model
from dpsynth.errors import PlanError, UsageError
from dpsynth.models.wavelet.autoregressive import Autoregressive
from dpsynth.planning.verify import VerifiedPlan
from dpsynth.private.token_task import TokenTask
from dpsynth.public.tokens import load_token_space, sizes_of
from dpsynth.released.asked import Asked
from dpsynth.released.spectral import completed, drawing_of, drawn_on


def pretrained_pictures(verified: VerifiedPlan, asked: Asked) -> Pictures:
    """Whole images of the public transformer.

    Raises:
        MissingError: `dpsynth pretrain` has not finished.
    """
    space = load_token_space(verified.run, verified.plan)
    captions, drawing = space.text_of(asked.captions), drawing_of(verified.plan)
    upto = space.tokenizer.layout.tokens

    def pictures(labels: Tensor, source: torch.Generator) -> NDArray[np.uint8]:
        nothing = torch.zeros(len(labels), 0, dtype=torch.int64)
        ids = drawn_on(
            space.transformer, captions[labels], nothing, upto, drawing=drawing, source=source
        )
        return space.decode(ids)

    return pictures


def nonprivate_pictures(
    verified: VerifiedPlan, asked: Asked, place: Place, recipe: str
) -> Pictures:
    """Images whose private tokens a transformer draws that saw the records without clip and noise.

    Finer tokens are the untouched public transformer's, as in the plan's samples.

    Raises:
        PlanError: the plan has no train stage.
        MissingError: `dpsynth pretrain` has not finished.
        DataError: the records were never charged for, and do not fit the plan.
    """
    plan = verified.plan
    model = _trained(verified, place, recipe)
    space = load_token_space(verified.run, plan)
    captions, drawing = space.text_of(asked.captions), drawing_of(plan)

    def pictures(labels: Tensor, source: torch.Generator) -> NDArray[np.uint8]:
        text, nothing = captions[labels], torch.zeros(len(labels), 0, dtype=torch.int64)
        ids = drawn_on(model, text, nothing, space.dim, drawing=drawing, source=source)
        if not plan.is_completed:
            return space.decode(ids)
        return completed(space, ids, None, text, drawing=drawing, source=source)

    return pictures


def with_detail(verified: VerifiedPlan, asked: Asked, coarse: Pictures) -> Pictures:
    """The same images with the detail that `dpsynth complete-wavelet` adds to a plan's samples.

    Their LL is kept as it is; tokens up to j0 come from them, finer ones from the transformer.
    """
    plan = verified.plan
    space = load_token_space(verified.run, plan)
    captions, drawing = space.text_of(asked.captions), drawing_of(plan)

    def pictures(labels: Tensor, source: torch.Generator) -> NDArray[np.uint8]:
        pyramid = space.tokenizer.wavelet(torch.from_numpy(coarse(labels, source)))
        text = captions[labels]
        prefix = space.tokenizer.encode_pyramid(pyramid, space.tokens.private)
        return completed(space, prefix, pyramid.ll, text, drawing=drawing, source=source)

    return pictures


def _trained(verified: VerifiedPlan, place: Place, recipe: str) -> Autoregressive:
    plan, settings = verified.plan, verified.plan.stages.train
    if settings is None:
        raise PlanError("this plan has no train stage")
    kept = Autoregressive(sizes_of(plan))
    if load_model(kept, place, recipe):
        return _frozen(kept)
    task = TokenTask.load(verified.run, plan)
    return _frozen(trained(verified, task, settings, place, recipe))


def _frozen(model: nn.Module) -> Autoregressive:
    if not isinstance(model, Autoregressive):
        raise UsageError(f"{type(model).__name__} is no transformer over tokens")
    return model.eval().requires_grad_(False)
