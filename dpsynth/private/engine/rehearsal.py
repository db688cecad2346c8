"""Rehearsals, in rare passes: that an example is alone in its rows, and that no gradient is missed.

They run the losses' function again, on the same batch and on batches in which half of the
examples are others, and hold the tape against plain autograd. What they find is compared and
thrown away; torch's random numbers go on as if they had not been.
"""

import secrets
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dpsynth.errors import UsageError
from dpsynth.private.engine import isolation
from dpsynth.private.engine.collect import Collector, Named
from dpsynth.private.engine.remembered import Remembered
from dpsynth.private.engine.rules import RULES
from dpsynth.private.engine.tape import Signature, Tape

Form = tuple[Signature, bool]
"""A pass by its uses of parameters, and whether it held more than one example."""

TOLERANCE = 1e-5
"""Of a row's size: the most by which other examples may move what is one example's own."""
MISSED = (1e-2, 1e-4)
"""A gradient may differ from autograd's by these shares of its own norm and of all of them."""
_SIZES, _VAIN, _LOOKS = 8, 32, 4
_FEW, _FEW_LOOKS = 8, 4
_SMALLEST = 1e-30


@dataclass
class Schedule:
    """Passes 1, 2, 4, 8, ... of each form, and the first few batch sizes: a logarithm in all.

    A rehearsal in vain (some gradient was zero or not finite, as behind layers that start at zero)
    does not count: the form's next pass is its first again, up to 32 times.
    """

    passes: dict[Form, int] = field(default_factory=dict)
    sizes: dict[Form, set[int]] = field(default_factory=dict)
    vain: dict[Form, int] = field(default_factory=dict)

    def due(self, form: Form, examples: int) -> bool:
        """Count a pass of `form`; whether it is to be rehearsed."""
        count = self.passes[form] = self.passes.get(form, 0) + 1
        sizes = self.sizes.setdefault(form, set())
        fresh = len(sizes) < _SIZES and examples not in sizes
        return fresh or count & (count - 1) == 0

    def done(self, form: Form, examples: int, *, whole: bool) -> None:
        """Note a rehearsal that was passed; not `whole`: some of it was in vain."""
        if not whole and self.vain.get(form, 0) < _VAIN:
            self.vain[form] = self.vain.get(form, 0) + 1
            self.passes[form] = 0
        elif len(self.sizes[form]) < _SIZES:
            self.sizes[form].add(examples)


@dataclass
class Look:
    """A few numbers (B, 4) that tell a row apart, and the row's size (B,)."""

    numbers: Tensor
    size: Tensor

    def differs(self, other: "Look", rows: Tensor) -> bool:
        """Whether some of the rows are further apart than rounding."""
        a, b = (x.numbers[rows].nan_to_num(1, 2, 3) for x in (self, other))
        most = TOLERANCE * self.size[rows].nan_to_num(0, 0, 0) + _SMALLEST
        return bool(((a - b).abs().amax(1) > most).any())

    def tells(self) -> bool:
        """Whether there is anything to see: finite numbers, and not zeros alone."""
        return bool(self.size.isfinite().all()) and bool(self.size.any())


@dataclass
class Run:
    """What one pass showed, by use: the layer, its input, and its output's gradient."""

    form: Signature
    layers: list[str]
    inputs: list[Look | None]
    losses: Look
    gradients: dict[int, Look] = field(default_factory=dict)


class Rehearsal:
    """Checks of one module under one losses' function; call it after a pass."""

    def __init__(self, module: nn.Module, losses: Callable[..., Tensor], named: Named) -> None:
        self._module, self._losses, self._named = module, losses, named
        self._tape = Tape(module, RULES)
        self._schedule = Schedule()

    def after(self, form: Signature, batch: tuple[Tensor, ...]) -> None:
        """Rehearse if this pass of the form is due.

        Raises:
            UsageError: one example reaches another's rows, the tape misses a parameter's
                gradient, or the module writes into its parameters or buffers.
        """
        key, examples = (form, len(batch[0]) > 1), len(batch[0])
        if not self._schedule.due(key, examples):
            return
        values = Remembered([x for x, _ in isolation.versions(self._module).values()])
        try:
            chosen = secrets.randbelow(examples)
            whole = self._missed(tuple(x[chosen : chosen + 1] for x in batch))
            if examples > 1:
                # A half of a few examples may happen to be closed under what moves them.
                looks = _FEW_LOOKS if examples <= _FEW else 1
                whole = all(self._mixed(batch) for _ in range(looks)) and whole
        finally:
            self._tape.records = []
        # Writes past torch's version counters (x.data, x.numpy()) show in the values.
        if not values.hold():
            raise isolation.written()
        self._schedule.done(key, examples, whole=whole)

    def _mixed(self, batch: tuple[Tensor, ...]) -> bool:
        """Run with each half of the examples replaced; the other half must not notice."""
        examples, device = len(batch[0]), batch[0].device
        source = torch.Generator().manual_seed(secrets.randbits(63))
        signs: dict[int, Tensor] = {}
        first = self._run(batch, torch.ones(examples), source, signs)
        order = torch.randperm(examples, generator=source)
        half = examples // 2
        for changed, kept in ((order[:half], order[half:]), (order[half:], order[:half])):
            index = torch.arange(examples)
            index[changed] = kept[torch.randint(len(kept), (len(changed),), generator=source)]
            weights = torch.randint(1, 3, (examples,), generator=source)
            others = tuple(x[index.to(x.device)] for x in batch)
            self._compare(first, self._run(others, weights, source, signs), kept.to(device))
        return all(look.tells() for look in first.gradients.values())

    def _run(
        self,
        batch: tuple[Tensor, ...],
        weights: Tensor,
        source: torch.Generator,
        signs: dict[int, Tensor],
    ) -> Run:
        """One pass with the losses' gradients `weights` (B,), divided out again by example."""
        tape, examples = self._tape, len(batch[0])

        def look(x: Tensor) -> Look:
            rows = x.detach().reshape(examples, -1)
            rows = rows if rows.dtype in (torch.float32, torch.float64) else rows.double()
            width = rows.shape[1]
            if width not in signs:
                signs[width] = torch.randint(0, 2, (width, _LOOKS), generator=source) * 2.0 - 1
            numbers = rows @ signs[width].to(rows)
            return Look(numbers.double(), torch.linalg.vector_norm(rows, dim=1).double())

        with self._same_numbers(), tape.watch(examples):
            losses = self._losses(self._module, *batch)
            isolation.check_paths(losses, tape, self._named)
            run = Run(
                tape.signature(),
                [tape.layer(record.label) for record in tape.records],
                [None if r.inputs is None else look(r.inputs) for r in tape.records],
                look(losses),
            )
            scale = weights.to(losses)

            def receive(number: int, gradient: Tensor) -> None:
                found = look(gradient)
                found.numbers /= scale.double()[:, None]
                found.size /= scale.double()
                run.gradients[number] = found

            if losses.requires_grad:
                tape.receive = receive
                torch.autograd.backward(losses, scale)
        return run

    def _compare(self, first: Run, other: Run, rows: Tensor) -> None:
        if first.form != other.form or first.gradients.keys() != other.gradients.keys():
            raise _mixes("the pass uses other layers when other examples are beside it")
        for number, layer in enumerate(first.layers):
            pairs = [
                (first.inputs[number], other.inputs[number]),
                (first.gradients.get(number), other.gradients.get(number)),
            ]
            if any(a and b and a.differs(b, rows) for a, b in pairs):
                raise _mixes(f"{layer}: one example's loss depends on another example's rows")
        if first.losses.differs(other.losses, rows):
            raise _mixes("the losses: one example's loss depends on another example's values")

    def _missed(self, one: tuple[Tensor, ...]) -> bool:
        """Hold the tape's gradient of a batch of one against plain autograd's."""
        tape = self._tape
        found: dict[str, Tensor] = {}
        with self._same_numbers(), tape.watch(1):
            losses = self._losses(self._module, *one)
            isolation.check_paths(losses, tape, self._named)
            if losses.requires_grad:
                collector = Collector(tape, self._named, exact=True)
                tape.receive = collector.receive
                torch.autograd.backward(losses, torch.ones_like(losses))
                for labels, kept in collector.finish()[0].items():
                    found[labels[0]] = kept.rows(slice(None)).flatten().double()
        with self._same_numbers():
            losses = self._losses(self._module, *one)
            if not losses.requires_grad:
                return True
            parameters = [p for _, p in self._named]
            plain = torch.autograd.grad(losses.sum(), parameters, allow_unused=True)
        wanted = {
            name: g.flatten().double()
            for (name, _), g in zip(self._named, plain, strict=True)
            if g is not None
        }
        return _agree(found, wanted)

    @contextmanager
    def _same_numbers(self) -> Iterator[None]:
        """Each pass draws the same dropout, and the caller's stream is as before.

        On a GPU by the kernels that add in a fixed order, as far as there are some: attention in
        half precision may else differ from pass to pass by more than the tolerance.
        """
        device = self._named[0][1].device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            if device.type != "cuda":
                yield
                return
            before = (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.use_deterministic_algorithms(True, warn_only=True)
                try:
                    yield
                finally:
                    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _agree(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    """Refuse a parameter of which the tape missed something; False where nothing could be seen."""
    numbers = [*found.values(), *wanted.values()]
    if not all(bool(x.isfinite().all()) for x in numbers):
        return False
    whole = sum(float(x.square().sum()) for x in wanted.values()) ** 0.5
    for name in {**found, **wanted}:
        nothing = torch.zeros_like((found if name in found else wanted)[name])
        a, b = found.get(name, nothing), wanted.get(name, nothing)
        off, own = (float(torch.linalg.vector_norm(x)) for x in (a - b, b))
        if off > MISSED[0] * own + MISSED[1] * whole + _SMALLEST:
            raise UsageError(
                f"the engine's gradient of the parameter {name!r} is not the one of autograd",
                hint="it is used where the engine cannot look (torch.autograd.Function, a "
                "scripted function): write that in torch operations, or freeze it",
            )
    return all(name in found or bool(g.any()) for name, g in wanted.items())


def _mixes(message: str) -> UsageError:
    return UsageError(
        message,
        hint="keep examples on the first axis, an example's draws side by side, leave out layers "
        "that mix examples, and draw random numbers by torch's default generator alone",
    )
