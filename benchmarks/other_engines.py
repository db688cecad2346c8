"""Per-example clipping by Opacus (hooks, ghost) and by torch.func, to stand beside dpsynth's.

Without noise, so that they are shown at their best. Each sees an example's draws folded into its
tokens around every leaf: as examples of their own, a record would move the sum by K C.
"""

import warnings
from collections.abc import Callable

import torch
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

Losses = Callable[..., Tensor]
Step = Callable[[], None]


class Constant(nn.Module):
    """A bare parameter as hooks can take it: a linear map of the number one."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape
        self.value = nn.Linear(1, torch.Size(shape).numel(), bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(N, *shape) plus the parameter (*shape)."""
        return x + self.value(x.new_ones(len(x), 1)).view(-1, *self.shape)


class Folding(nn.Module):
    """Shows a linear layer (B, K T, I) for its (B K, T, I)."""

    def __init__(self, layer: nn.Module, examples: int) -> None:
        super().__init__()
        self.layer, self.examples = layer, examples

    def forward(self, x: Tensor) -> Tensor:
        """(N, ..., O) of (N, ..., I)."""
        seen = x.reshape(self.examples, -1, x.shape[-1])
        found: Tensor = self.layer(seen)
        return found.reshape(*x.shape[:-1], found.shape[-1])


def fold(model: nn.Module, examples: int) -> nn.Module:
    """The model with all its linear layers seen through `Folding`: in place."""
    for owner in list(model.modules()):
        for name, layer in list(owner.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(owner, name, Folding(layer, examples))
    return model


def hooks(model: nn.Module, losses: Losses, data: tuple[Tensor, ...], clip: float) -> Step:
    """Opacus's hooks: gradients of all examples, then norms, then their weighted sum."""
    hooked = GradSampleModule(fold(model, len(data[0])), loss_reduction="sum", strict=False)
    trained = [p for p in hooked.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=1e-4)

    def step() -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Full backward hook is firing")
            losses(hooked, *data).sum().backward()
        used = [p for p in trained if getattr(p, "grad_sample", None) is not None]
        squares = sum(p.grad_sample.flatten(1).square().sum(1) for p in used)
        factors = (clip / (squares.sqrt() + 1e-6)).clamp(max=1.0)
        for p in used:
            p.grad = torch.einsum("b,b...->...", factors, p.grad_sample) / len(data[0])
            p.grad_sample = None
        optimiser.step()
        optimiser.zero_grad()

    return step


def ghost(model: nn.Module, losses: Losses, data: tuple[Tensor, ...], clip: float) -> Step:
    """Opacus's ghost clipping: norms in one backward pass, the sum in a second."""
    hooked = GradSampleModuleFastGradientClipping(
        fold(model, len(data[0])), max_grad_norm=clip, use_ghost_clipping=True, strict=False
    )
    optimiser = torch.optim.AdamW(hooked.parameters(), lr=1e-4)

    def step() -> None:
        found = losses(hooked, *data)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Full backward hook is firing")
            found.mean().backward(retain_graph=True)
        optimiser.zero_grad()
        factors = hooked.get_clipping_coef()
        hooked.disable_hooks()
        (factors * found).mean().backward()
        hooked.enable_hooks()
        optimiser.step()
        optimiser.zero_grad()

    return step


def func(model: nn.Module, losses: Losses, data: tuple[Tensor, ...], clip: float) -> Step:
    """`torch.func`: the gradient function mapped over examples."""
    named = dict(model.named_parameters())
    optimiser = torch.optim.AdamW(named.values(), lr=1e-4)

    def one(parameters: dict[str, Tensor], *example: Tensor) -> Tensor:
        def applied(*inputs: Tensor) -> Tensor:
            return functional_call(model, parameters, inputs)  # type: ignore[no-any-return]

        return losses(applied, *(x[None] for x in example)).sum()  # type: ignore[arg-type]

    mapped = vmap(grad(one), (None, *(0,) * len(data)))

    def step() -> None:
        values = {name: p.detach() for name, p in named.items()}
        found = mapped(values, *data)
        squares = sum(g.flatten(1).square().sum(1) for g in found.values())
        factors = (clip / (squares.sqrt() + 1e-6)).clamp(max=1.0)
        for name, g in found.items():
            named[name].grad = torch.einsum("b,b...->...", factors, g) / len(data[0])
        optimiser.step()
        optimiser.zero_grad()

    return step


ENGINES: dict[str, Callable[[nn.Module, Losses, tuple[Tensor, ...], float], Step]] = {
    "Opacus hooks": hooks,
    "Opacus ghost": ghost,
    "torch.func": func,
}
