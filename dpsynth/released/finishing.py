"""How decoded images are finished: moved a little where the plan says so, and sharpened.

Post-processing: the gain comes from public images or from the plan, the movement from neither.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpsynth.artifacts.files import read_json
from dpsynth.artifacts.rooms import RunDir
from dpsynth.errors import MissingError, typed
from dpsynth.models.deform import jitter
from dpsynth.models.finish import sharpen
from dpsynth.planning.sampling import Jitter
from dpsynth.planning.schema import Plan


@dataclass(frozen=True)
class Finish:
    """Gain of the unsharp mask (0: none), and the ranges of the movement (None: none)."""

    gain: float
    augment: Jitter | None

    def __call__(self, images: Tensor, source: torch.Generator) -> Tensor:
        """Finished images (n, C, H, W) in [0, 1]; untouched where there is nothing to do.

        Moved before sharpened: resampling keeps nearly all of a soft image, and blurs a sharp one.
        """
        if self.augment is not None:
            how = self.augment
            images = jitter(images.float(), how.rotation, how.scale, how.shift, source)
        if self.gain:
            images = sharpen(images.float(), self.gain)
        return images

    def facts(self) -> dict[str, Any]:
        """What the samples' origin says of it; nothing where nothing is done."""
        facts: dict[str, Any] = {"sharpen": self.gain} if self.gain else {}
        if self.augment is not None:
            facts["augment"] = self.augment.model_dump()
        return facts


def finish_of(run: RunDir, plan: Plan, *, augmented: bool) -> Finish:
    """The plan's finish, without its augmentation unless `augmented`.

    Raises:
        MissingError: the plan takes the public gain, and the calibration has none.
    """
    settings = plan.sampling
    gain = _public_gain(run) if settings.sharpen == "public" else settings.sharpen
    return Finish(gain, settings.augment if augmented else None)


def _public_gain(run: RunDir) -> float:
    gain = read_json(run.calibration).get("sharpen_gain")
    if gain is None:
        raise MissingError(
            "the calibration holds no sharpening gain",
            hint=typed("dpsynth", "pretrain", run.root),
        )
    return float(gain)
