"""An own flow prior as a generator of Private Evolution: its members are codes.

A variation renoises a code to time t and lets the flow integrate again from there: StraightDP,
Table 9 (`t_v`), with equation 1's interpolation.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpsynth.artifacts.files import read_json, sha256_file
from dpsynth.artifacts.rooms import RunDir
from dpsynth.errors import MissingError, UsageError, typed
from dpsynth.models.flow import VelocityField, euler, interpolate, steps_from
from dpsynth.models.threads import one_thread
from dpsynth.models.velocity import load_for
from dpsynth.planning.schema import Plan
from dpsynth.public.recipes import PRIOR
from dpsynth.public.representation import GEOMETRY, Representation, load_representation

_BATCH = 1_000
_NUMBERS = 2**23  # of codes that are integrated at once: bounds memory

Codes = NDArray[np.float32]
Labels = NDArray[np.int64]


@dataclass(frozen=True)
class FlowGenerator:
    """A velocity model v(x, t, y) and the representation of its codes; a `Generator`.

    null: the null label, `classes`. steps: Euler steps from t = 0 to 1; a variation from t takes
    its share of them. guidance: of `models.flow.guided`.
    """

    velocity: VelocityField
    representation: Representation
    null: int
    steps: int = 25
    guidance: float = 1.0

    def draw(self, labels: Labels, source: torch.Generator) -> Codes:
        """Codes (P, d) of these classes (P,), from noise."""
        shape = (len(labels), self.representation.dim)
        return self._integrated(torch.randn(shape, generator=source), labels, 0.0)

    def vary(
        self, members: Codes, labels: Labels, strength: float, source: torch.Generator
    ) -> Codes:
        """Codes (P, d) renoised to t = 1 - `strength` and integrated again.

        Raises UsageError for a strength outside (0, 1].
        """
        if not 0 < strength <= 1:
            raise UsageError(f"a variation has a strength above 0 and up to 1, got {strength}")
        t = 1.0 - strength
        codes = torch.from_numpy(np.ascontiguousarray(members))
        noise = torch.randn(codes.shape, generator=source)
        times = torch.full(codes.shape[:1], t)
        return self._integrated(interpolate(codes, noise, times), labels, t)

    def images(self, members: Codes) -> NDArray[np.uint8]:
        """The members decoded: images (P, H, W, C)."""
        return self.representation.decode(torch.from_numpy(np.ascontiguousarray(members)))

    def _integrated(self, start: Tensor, labels: Labels, t: float) -> Codes:
        steps = steps_from(self.velocity, self.steps, t)
        parts, size = [], max(1, min(_BATCH, _NUMBERS // max(1, start.shape[1])))
        with one_thread():
            for at in range(0, len(start), size):
                own = torch.from_numpy(np.ascontiguousarray(labels[at : at + size]))
                parts.append(
                    euler(
                        self.velocity, start[at : at + size], own, null=self.null,
                        steps=steps, guidance=self.guidance, start_time=t,
                    )
                )  # fmt: skip
        found: Codes = torch.cat(parts).float().numpy() if parts else start.numpy()
        return found


def own_generator(run: RunDir, plan: Plan) -> tuple[FlowGenerator, dict[str, str]]:
    """The plan's public prior as a generator, and what it is: facts of its populations.

    Raises:
        MissingError: `dpsynth pretrain` has not finished.
        UsageError: a public file is not the one that the calibration names.
        ReplayError: the calibration is not the one that the run's charges name.
    """
    representation = load_representation(run, plan)
    path, hint = run.public / PRIOR, typed("dpsynth", "pretrain", run.root)
    if not path.exists():
        raise MissingError("the public prior is missing", hint=hint)
    if sha256_file(path) != read_json(run.calibration).get("prior_sha256"):
        raise UsageError(f"{PRIOR} is not the file that calibration.json names", hint=hint)
    velocity, _ = load_for(path, plan)
    settings = plan.sampling
    generator = FlowGenerator(
        velocity,
        representation,
        null=plan.private.conditions,
        steps=settings.steps,
        guidance=settings.guidance,
    )
    facts = {
        "prior_sha256": sha256_file(path),
        "geometry_sha256": sha256_file(run.public / GEOMETRY),
        "steps": str(settings.steps),
        "guidance": repr(settings.guidance),
    }
    return generator, facts
