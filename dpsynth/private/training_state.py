"""What DP-SGD carries from step to step, all of it computed from noisy gradients alone."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpsynth.artifacts.tensors import load_tensors, save_tensors
from dpsynth.artifacts.trained import AVERAGE, CHECKPOINT
from dpsynth.errors import UsageError
from dpsynth.models.spectral import cap, cap_of, matrices
from dpsynth.planning.training import Train
from dpsynth.private.optimisers import build_optimiser, learning_rate, state_names

FORMAT = CHECKPOINT


class TrainingState:
    """Model, optimiser and the moving average of the weights after `step` steps."""

    def __init__(
        self,
        model: nn.Module,
        settings: Train,
        noise: float,
        facts: Mapping[str, str] | None = None,
    ) -> None:
        """Start anew; `noise` is the standard deviation of an entry's noise in a mean gradient.

        `facts`: what checkpoints say beside the weights, of the plan alone.
        """
        self.model = model
        self.step = 0
        self._settings, self._facts = settings, dict(facts or {})
        self._named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.average = {name: p.detach().clone() for name, p in self._named.items()}
        self._optimiser = build_optimiser(self._named.values(), settings, noise)
        self._kept = state_names(settings)
        bound, chosen = cap_of(model), matrices(model) & self._named.keys()
        self._cap = (bound, sorted(chosen)) if bound is not None else None

    def apply(self, gradients: Mapping[str, Tensor]) -> None:
        """One step along noisy gradients (shapes of the weights), then the average."""
        for name, parameter in self._named.items():
            parameter.grad = gradients[name].to(parameter.dtype)
        for group in self._optimiser.param_groups:
            group["lr"] = learning_rate(self._settings, self.step)
        self._optimiser.step()
        self._optimiser.zero_grad(set_to_none=True)
        self.step += 1
        with torch.no_grad():
            self._capped(self._named)
            for name, parameter in self._named.items():
                self.average[name].lerp_(parameter, 1 - self._settings.ema)
            self._capped(self.average)

    def _capped(self, weights: Mapping[str, Tensor]) -> None:
        """Keep a backbone's spectral cap. Post-processing of a noisy step: free, and no state."""
        if self._cap is not None:
            bound, names = self._cap
            cap((weights[name] for name in names), bound)

    def averaged(self) -> nn.Module:
        """The model, its weights replaced by their average, in eval mode."""
        with torch.no_grad():
            for name, parameter in self._named.items():
                parameter.copy_(self.average[name])
        return self.model.eval()

    def save(self, path: Path) -> None:
        """Write everything atomically, for the curator's room. UsageError before the first step."""
        if self.step == 0:
            raise UsageError("a checkpoint holds at least one step, this training has taken none")
        facts = {"format": FORMAT, "room": "curator", "step": str(self.step)}
        facts |= {"optimizer": self._settings.optimizer.kind}
        save_tensors(path, self._arrays(), self._facts | facts)

    def digest(self) -> str:
        """SHA-256 of everything carried: processes that train together hold the same bits."""
        found = hashlib.sha256(str(self.step).encode())
        for name, array in sorted(self._arrays().items()):
            found.update(name.encode() + array.tobytes())
        return found.hexdigest()

    def _arrays(self) -> dict[str, NDArray[Any]]:
        tensors = {f"{AVERAGE}{n}": v for n, v in self.average.items()}
        for name, parameter in self._named.items():
            tensors[f"model/{name}"] = parameter.detach()
            for key in self._kept if self.step else ():
                tensors[f"{key}/{name}"] = self._optimiser.state[parameter][key]
        return {n: v.detach().cpu().contiguous().numpy() for n, v in tensors.items()}

    def load(self, path: Path) -> None:
        """Continue from a checkpoint. UsageError when it is of another model or optimiser."""
        arrays, metadata = load_tensors(path)
        wanted = {
            f"{key}/{name}": tuple(p.shape)
            for key in ("average", "model", *self._kept)
            for name, p in self._named.items()
        }
        # Files that say nothing are of the time when Adam was the only one.
        same = metadata.get("optimizer", "adam") == self._settings.optimizer.kind
        if (
            not same
            or metadata.get("format") != FORMAT
            or wanted != {n: v.shape for n, v in arrays.items()}
        ):
            raise UsageError(f"{path.name} is not a checkpoint of this plan's model and optimizer")
        self.step = int(metadata["step"])
        saved = {n: torch.from_numpy(np.array(v, copy=True)) for n, v in arrays.items()}
        with torch.no_grad():
            for name, parameter in self._named.items():
                parameter.copy_(saved[f"model/{name}"])
                self.average[name].copy_(saved[f"{AVERAGE}{name}"])
                own = {key: saved[f"{key}/{name}"].to(parameter.device) for key in self._kept}
                # Optimisers with a bias correction count their steps; SGD would ignore it.
                self._optimiser.state[parameter] = {"step": torch.tensor(float(self.step)), **own}
