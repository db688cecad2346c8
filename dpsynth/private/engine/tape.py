"""One watched forward pass: which operations trainable parameters enter, and what went in.

For the time of the pass each trainable parameter of the module is replaced by a `Tracked` tensor
of the same values that takes no part in autograd. Every operation that it enters comes here: a
known one is carried out with its inputs noted, an unknown one is refused. So nothing of a
parameter's gradient can pass by unseen, and autograd works out output gradients alone.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from dpsynth.errors import UsageError
from dpsynth.private.engine.contributions import Contribution

KNOWN = (
    "Linear, Conv1d, Conv2d, Embedding, LayerNorm, GroupNorm, RMSNorm, MultiheadAttention, "
    "and sums and products with a parameter"
)


class Tracked(Tensor):
    """A trainable parameter, or a function of parameters alone, during a watched pass.

    plain: the same values without gradient; source: the same with its way back to the parameters;
    roots: labels of those parameters.
    """

    plain: Tensor
    source: Tensor
    tape: "Tape"
    label: str
    roots: frozenset[str]

    @classmethod
    def wrap(cls, source: Tensor, tape: "Tape", roots: frozenset[str]) -> "Tracked":
        """Track `source`, a function of the parameters `roots`."""
        plain = source.detach()
        tracked = plain.as_subclass(cls)
        tracked.plain, tracked.source, tracked.tape, tracked.roots = plain, source, tape, roots
        tracked.label = min(roots)
        return tracked

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Hand the operation to the tape of its first tracked argument."""
        del types
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _ASKED:
                return func(*plain(args))
            tracked = next(x for x in tensors((args, kwargs)) if isinstance(x, Tracked))
            return tracked.tape.call(func, args, kwargs)


_ASKED = {getattr(Tensor, name).__get__ for name in ("dtype", "device", "shape", "ndim", "layout")}
"""Questions that depend on no value; peft asks for a type before each use."""
Signature = tuple[tuple[str, str, int], ...]
"""A pass by its uses: label, operation and rows an example, in order."""
Given = list[tuple[list[Tracked], Contribution]]
"""Contributions of one use, each with the parameters whose gradients it holds in a row."""


@dataclass
class Record:
    """One use of parameters: their contributions follow from the output's gradient.

    inputs: what is kept of the forward pass, with its version, so that later changes are seen.
    """

    tracked: list[Tracked]
    given: Callable[[Tensor], Given]
    inputs: Tensor | None
    version: int
    signature: tuple[str, str, int]

    @property
    def label(self) -> str:
        """The first of its parameters, for messages."""
        return self.signature[0]

    def done(self) -> None:
        """Let go of what was kept of the examples."""
        self.inputs, self.given = None, _spent


class Tape:
    """The uses of a module's trainable parameters in one forward pass over B examples."""

    def __init__(self, module: nn.Module, rules: dict[Any, Callable[..., Any]]) -> None:
        self.examples = 0
        self.records: list[Record] = []
        self.receive: Callable[[int, Tensor], None] = refuse_gradient
        self._rules = rules
        self._module = module
        # Held, not by id alone: the id of a tensor that is gone may come back as an example's.
        self._constants: dict[int, Tensor] = {}
        self._anchor = torch.zeros((), requires_grad=True)

    @contextmanager
    def watch(self, examples: int) -> Iterator[None]:
        """Track the module's parameters inside the block; the module is as before afterwards."""
        self.examples = examples
        self.records = []
        swapped: list[tuple[dict[str, Any], str, nn.Parameter]] = []
        tracked: dict[int, Tracked] = {}
        self._constants = {id(buffer): buffer for buffer in self._module.buffers()}
        attributes = [(owner, dict(owner.__dict__)) for owner in self._module.modules()]
        try:
            for prefix, owner in self._module.named_modules():
                for name, parameter in owner._parameters.items():
                    if parameter is None or not parameter.requires_grad:
                        if parameter is not None:
                            self.constant(parameter)
                        continue
                    if id(parameter) not in tracked:
                        label = f"{prefix}.{name}" if prefix else name
                        tracked[id(parameter)] = Tracked.wrap(parameter, self, frozenset((label,)))
                    swapped.append((owner._parameters, name, parameter))
            for table, name, parameter in swapped:
                table[name] = tracked[id(parameter)]
            yield
        finally:
            for table, name, parameter in swapped:
                table[name] = parameter
            for owner, before in attributes:
                _restore(owner, before)

    def constant(self, x: Tensor) -> Tensor:
        """Take `x` for the same in every pass, whoever is in the batch."""
        self._constants[id(x)] = x
        return x

    def is_anchor(self, x: Tensor) -> bool:
        """Whether a leaf of the graph is the engine's own."""
        return x is self._anchor

    def call(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Carry out an operation on tracked tensors, by its rule where it meets the examples."""
        if not torch.is_grad_enabled():
            return func(*plain(args), **plain(kwargs))
        rule = self._rules.get(func)
        if rule is not None:
            return rule(self, func, *args, **kwargs)
        if self.strangers(args, kwargs):
            self.refuse(func, args, kwargs)
        return self.derive(func, *args, **kwargs)

    def derive(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """An operation on parameters and constants alone: the result is tracked as well."""
        name = getattr(func, "__name__", str(func))
        inplace = name.endswith("_") and not name.endswith("__")
        if inplace or name in ("__setitem__", "__iadd__", "__imul__", "__isub__", "__itruediv__"):
            self.refuse(func, args, kwargs)
        found = (x.roots for x in tensors((args, kwargs)) if isinstance(x, Tracked))
        roots: frozenset[str] = frozenset().union(*found)
        return self._wrapped(func(*sources(args), **sources(kwargs)), roots)

    def _wrapped(self, value: Any, roots: frozenset[str]) -> Any:
        if isinstance(value, Tensor):
            return Tracked.wrap(value, self, roots) if value.requires_grad else value
        if isinstance(value, tuple | list) and any(isinstance(x, Tensor) for x in value):
            return [self._wrapped(x, roots) for x in value]
        return value

    def strangers(self, *values: Any) -> list[Tensor]:
        """Tensors among the arguments that are no parameter, no buffer and no plain number."""
        return [
            x
            for x in tensors(values)
            if not isinstance(x, Tracked)
            and id(x) not in self._constants
            and (x.ndim > 0 or x.requires_grad)
        ]

    def record(
        self,
        kind: str,
        output: Tensor,
        tracked: list[Tracked],
        given: Callable[[Tensor], Given],
        kept: Tensor | None = None,
    ) -> Tensor:
        """Note a use whose output (B m, ...) is example-major; returns the output."""
        label = tracked[0].label
        if output.ndim == 0 or len(output) == 0 or len(output) % self.examples:
            raise UsageError(
                f"{self.layer(label)} gave a tensor of shape {tuple(output.shape)}, expected a "
                f"first axis of the batch's examples, or of a multiple of them",
                hint="keep examples on the first axis, with an example's draws side by side "
                "(x.flatten(0, 1) of (B, K, ...))",
            )
        if output._is_view():  # a view loses its hooks when it is changed in place
            output = torch.ops.aten._unsafe_view(output, output.shape)
        if not output.requires_grad:
            output = _Attach.apply(output, self._anchor)
        signature = (label, kind, len(output) // self.examples)
        version = 0 if kept is None else kept._version
        number = len(self.records)
        self.records.append(Record(tracked, given, kept, version, signature))
        # Set now, so that it gets the gradient of this output also if that is changed in place.
        hook = partial(self._arrived, number)
        output.register_hook(hook)  # type: ignore[no-untyped-call]
        return output

    def _arrived(self, number: int, gradient: Tensor) -> None:
        self.receive(number, gradient)

    def signature(self) -> Signature:
        """The pass by its uses of parameters."""
        return tuple(record.signature for record in self.records)

    def refuse(self, func: Any, *values: Any) -> NoReturn:
        """Raise for an operation without a rule, naming the layer."""
        tracked = next(x for x in tensors(values) if isinstance(x, Tracked))
        name = getattr(func, "__name__", str(func))
        raise UsageError(
            f"{self.layer(tracked.label)}: the engine has no per-example rule for {name!r} with "
            f"the trainable parameter {tracked.label!r}",
            hint=f"build it of {KNOWN}; or freeze it with requires_grad_(False)",
        )

    def layer(self, label: str) -> str:
        """The layer of a parameter, by path and class."""
        path = label.rpartition(".")[0]
        return f"layer {path or '(top)'!r} ({type(self._module.get_submodule(path)).__name__})"


class _Attach(torch.autograd.Function):
    """Makes a tensor a node of the graph, as if it depended on something that has a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor) -> Tensor:
        del anchor
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        del ctx, gradient
        return None, None


def _restore(owner: nn.Module, before: dict[str, Any]) -> None:
    """Undo attributes that the pass set to tracked tensors (torch's old `weight_norm` does)."""
    left = [name for name, value in owner.__dict__.items() if type(value) is Tracked]
    for name in left:
        if name in before:
            owner.__dict__[name] = before[name]
        else:
            del owner.__dict__[name]


def _spent(gradient: Tensor) -> Given:
    raise UsageError(f"an output of shape {tuple(gradient.shape)} gave its gradient twice")


def refuse_gradient(number: int, gradient: Tensor) -> None:
    """Receive no gradient: nobody asked for one."""
    del gradient
    raise UsageError(
        f"a gradient of use {number} came outside the engine's own backward pass",
        hint="the losses' function must not call backward itself",
    )


def tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from tensors(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from tensors(one)


def plain(value: Any) -> Any:
    """The same arguments, tracked tensors without their gradient."""
    return _mapped(value, lambda tracked: tracked.plain)


def sources(value: Any) -> Any:
    """The same arguments, tracked tensors with their way back to the parameters."""
    return _mapped(value, lambda tracked: tracked.source)


def _mapped(value: Any, change: Callable[[Tracked], Tensor]) -> Any:
    if isinstance(value, Tracked):
        return change(value)
    if isinstance(value, tuple | list):
        return type(value)(_mapped(one, change) for one in value)
    if isinstance(value, dict):
        return {key: _mapped(one, change) for key, one in value.items()}
    return value
