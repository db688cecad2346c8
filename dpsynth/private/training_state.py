"""What DP-SGD carries from step to step, all of it computed from noisy gradients alone."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from dpsynth.artifacts.tensors import load_tensors, save_tensors
from dpsynth.errors import UsageError

FORMAT = "dpsynth-checkpoint-1"
_MOMENTS = ("exp_avg", "exp_avg_sq")


class TrainingState:
    """Model, Adam and the moving average of the weights after `step` steps."""

    def __init__(self, model: nn.Module, learning_rate: float, decay: float) -> None:
        self.model = model
        self.decay = decay
        self.step = 0
        self._named = dict(model.named_parameters())
        self.average = {name: p.detach().clone() for name, p in self._named.items()}
        self._adam = torch.optim.Adam(self._named.values(), lr=learning_rate)

    def apply(self, gradients: Mapping[str, Tensor]) -> None:
        """One Adam step along noisy gradients (shapes of the weights), then the average."""
        for name, parameter in self._named.items():
            parameter.grad = gradients[name].to(parameter.dtype)
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        self.step += 1
        with torch.no_grad():
            for name, parameter in self._named.items():
                self.average[name].lerp_(parameter, 1 - self.decay)

    def averaged(self) -> nn.Module:
        """The model, its weights replaced by their average, in eval mode."""
        with torch.no_grad():
            for name, parameter in self._named.items():
                parameter.copy_(self.average[name])
        return self.model.eval()

    def save(self, path: Path) -> None:
        """Write everything atomically, for the curator's room."""
        tensors = {f"average/{n}": v for n, v in self.average.items()}
        for name, parameter in self._named.items():
            tensors[f"model/{name}"] = parameter.detach()
            for key in _MOMENTS:
                tensors[f"{key}/{name}"] = self._adam.state[parameter][key]
        arrays = {n: v.detach().cpu().contiguous().numpy() for n, v in tensors.items()}
        save_tensors(path, arrays, {"format": FORMAT, "room": "curator", "step": str(self.step)})

    def load(self, path: Path) -> None:
        """Continue from a checkpoint. UsageError when it is of another model or format."""
        arrays, metadata = load_tensors(path)
        wanted = {
            f"{key}/{name}": tuple(p.shape)
            for key in ("average", "model", *_MOMENTS)
            for name, p in self._named.items()
        }
        if metadata.get("format") != FORMAT or wanted != {n: v.shape for n, v in arrays.items()}:
            raise UsageError(f"{path.name} is not a checkpoint of this plan's model")
        self.step = int(metadata["step"])
        saved = {n: torch.from_numpy(np.array(v, copy=True)) for n, v in arrays.items()}
        with torch.no_grad():
            for name, parameter in self._named.items():
                parameter.copy_(saved[f"model/{name}"])
                self.average[name].copy_(saved[f"average/{name}"])
                moments = {key: saved[f"{key}/{name}"] for key in _MOMENTS}
                self._adam.state[parameter] = {"step": torch.tensor(float(self.step)), **moments}
