"""The spectral cap: no weight matrix of a linear layer has an operator norm above s (Table 9).

Applied after optimiser steps: W <- W min(1, s / sigma_max(W)). On noisy weights it is
post-processing, free of privacy cost. sigma_max is convex (fact B.3 iv), so averages of capped
weights are within the cap as well.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

_BELOW = 1 - 2.0**-20
"""Capped matrices end a hair below s: rounding can't pass it, and a second cap changes nothing."""


def operator_norm(matrix: Tensor) -> Tensor:
    """sigma_max of a matrix (m, n), float64: the root of its smaller Gram matrix's eigenvalue."""
    exact = matrix.detach().double()
    if len(exact) > exact.shape[1]:
        exact = exact.mT
    largest: Tensor = torch.linalg.eigvalsh(exact @ exact.mT)[-1]
    return largest.clamp(min=0).sqrt()


def matrices(model: nn.Module) -> frozenset[str]:
    """Names of the parameters that a cap holds for: weights of linear layers."""
    return frozenset(
        f"{name}.weight" if name else "weight"
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear)
    )


@torch.no_grad()
def cap(weights: Iterable[Tensor], bound: float) -> None:
    """Scale each matrix down, in place, to an operator norm of at most `bound`."""
    for weight in weights:
        # The norm is at most its Frobenius norm: most small matrices need nothing more.
        if float(torch.linalg.vector_norm(weight, dtype=torch.float64)) <= bound:
            continue
        norm = float(operator_norm(weight))
        if norm > bound:
            weight.mul_(bound * _BELOW / norm)


def cap_of(model: nn.Module) -> float | None:
    """The cap s that a velocity model is to keep; None where it has none."""
    bound = getattr(model, "spectral", None)
    return bound if isinstance(bound, float) else None


def cap_spectral(model: nn.Module, bound: float | None) -> None:
    """Cap all linear layers of a model at `bound`, in place; nothing where it is None.

    An optimiser's state stays as it is.
    """
    if bound is not None:
        chosen = matrices(model)
        cap((p for name, p in model.named_parameters() if name in chosen), bound)
