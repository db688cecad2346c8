"""What holds in every pass: no gradient goes unseen, nothing of the examples stays behind."""

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dpsynth.errors import UsageError
from dpsynth.private.engine.collect import Named
from dpsynth.private.engine.tape import Tape

Versions = dict[tuple[int, str], tuple[Tensor, int]]
"""(id of the layer, name in it) -> a parameter or buffer, and how often it was written."""

_locks: "weakref.WeakKeyDictionary[nn.Module, threading.Lock]" = weakref.WeakKeyDictionary()
_locks_guard = threading.Lock()


def check_layers(module: nn.Module) -> None:
    """Refuse layers that look across examples by nature, or that keep parameters out of sight.

    Raises:
        UsageError: batch norm of any kind, running statistics, or a scripted module.
    """
    for name, layer in module.named_modules():
        named = f"layer {name or '(top)'!r} ({type(layer).__name__})"
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) or getattr(
            layer, "track_running_stats", False
        ):
            raise UsageError(
                f"{named} mixes the examples of a batch",
                hint="replace it by GroupNorm or LayerNorm: torch.nn.GroupNorm(groups, channels)",
            )
        if isinstance(layer, torch.jit.ScriptModule):
            raise UsageError(
                f"{named} is compiled by torch.jit, which hides what it does with parameters",
                hint="give the module as it was before torch.jit.script or torch.jit.trace",
            )


def check_parameters(module: nn.Module, named: Named) -> None:
    """Refuse a module whose trainable parameters are not the ones that the engine was made for."""
    now = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    same = len(now) == len(named) and all(
        a == b and p is q for (a, p), (b, q) in zip(now, named, strict=True)
    )
    if not same:
        raise UsageError(
            "the module's trainable parameters changed since the engine was made",
            hint="make a new PerExampleClipper after freezing, unfreezing or replacing parameters",
        )


def check_lengths(batch: tuple[Tensor, ...]) -> None:
    """Refuse tensors that do not hold one row an example."""
    if not batch or any(x.ndim == 0 or len(x) != len(batch[0]) for x in batch):
        raise UsageError(
            "the batch's tensors differ in length, expected one row an example in each",
            hint="give what belongs to no example to the losses' function by other ways",
        )


def versions(module: nn.Module) -> Versions:
    """Each parameter (frozen ones too) and buffer, and how often it was written.

    The tensors are held: the id of one that is gone may come back as another's.
    """
    return {
        (id(owner), name): (x, x._version)
        for owner in module.modules()
        for table in (owner._parameters, owner._buffers)
        for name, x in table.items()
        if x is not None
    }


def check_written(module: nn.Module, before: Versions) -> None:
    """Refuse a pass that writes into buffers or parameters: they would carry examples unclipped."""
    now = versions(module)
    same = now.keys() == before.keys() and all(
        now[name][0] is held and now[name][1] == version for name, (held, version) in before.items()
    )
    if not same:
        raise written()


def written() -> UsageError:
    """The error for a pass that leaves something of the examples on the module."""
    return UsageError(
        "the module wrote into one of its buffers or parameters during the pass",
        hint="what it learns from examples there is outside the clip: put that layer in eval mode "
        "(layer.eval()) or leave it out",
    )


def check_paths(losses: Tensor, tape: Tape, named: Named) -> None:
    """Refuse leaves that would get a gradient: parameters that the tape misses, and others."""
    names = {id(p): name for name, p in named}
    seen, open_nodes = set(), [losses.grad_fn]
    while open_nodes:
        node = open_nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and not tape.is_anchor(leaf):
            raise _unseen(names.get(id(leaf)))
        open_nodes.extend(parent for parent, _ in node.next_functions)


def _unseen(name: str | None) -> UsageError:
    if name is None:
        return UsageError(
            "the losses depend on a tensor with requires_grad that is no parameter of the module",
            hint="register it on the module as a parameter, or detach it",
        )
    return UsageError(
        f"the parameter {name!r} enters the losses unseen by the engine",
        hint="a layer holds it outside its parameters (as recurrent layers do): build "
        "the layer of Linear, or freeze it with requires_grad_(False)",
    )


@contextmanager
def alone(module: nn.Module) -> Iterator[None]:
    """Hold the module: a pass swaps its parameters, so only one may run at a time."""
    with _locks_guard:
        lock = _locks.setdefault(module, threading.Lock())
    if not lock.acquire(blocking=False):
        raise UsageError(
            "the engine is already at work on this module",
            hint="give each thread a copy of the module, and call no engine inside the losses",
        )
    try:
        yield
    finally:
        lock.release()


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """No autocast and no TF32 inside, whatever is set outside (D2 counts on float32 products)."""
    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions
