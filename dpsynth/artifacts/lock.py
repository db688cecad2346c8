"""`plan.lock.json`: what was verified. Slots with their noise, the composed epsilon, versions.

The lock holds the plan's facts without paths, and its own SHA-256 over the canonical
spelling of everything else in it. A file that is not byte for byte what `write_lock` would
write is refused: a machine's file is never edited by hand.
"""

import json
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from dpsynth.accounting.events import Event
from dpsynth.accounting.statistics import Statistic, statistic_from_json
from dpsynth.artifacts.failpoints import reach
from dpsynth.artifacts.files import canonical_json, readable_json, sha256_bytes, write_atomic
from dpsynth.errors import MissingError, ReplayError

FORMAT = 1

_HINT = "ask for an unedited copy, or plan again into a new run folder"


def plan_hash(facts: dict[str, Any]) -> str:
    """SHA-256 of a plan's facts (`Plan.facts()`), in hex."""
    return sha256_bytes(canonical_json(facts))


@dataclass(frozen=True)
class Slot:
    """One planned mechanism execution, chargeable once.

    `id` counts from 1 in planned order; `noise_std` is the absolute noise in the
    statistic's own (whitened) units; `rate` and `steps` are None for a plain Gaussian.
    A spare stands in for a slot that a crash forfeited.
    """

    id: int
    stage: str
    name: str
    statistic: Statistic
    noise_std: float
    rate: float | None = None
    steps: int | None = None
    spare: bool = False

    def event(self) -> Event:
        """What the accountant composes; the sensitivity comes from the statistic."""
        from dpsynth.accounting.compose import event_for  # SciPy enters here

        return event_for(self.statistic, self.noise_std, self.rate, self.steps)

    @property
    def release(self) -> str:
        """Name of the release this slot serves: its own, or that of the slot it spares."""
        return self.name.split("-spare-")[0] if self.spare else self.name

    def spec(self) -> dict[str, Any]:
        """What a charge repeats of its slot, as plain JSON values."""
        return {
            "stage": self.stage,
            "mechanism": self.name,
            "statistic": _statistic_json(self.statistic),
            "noise_std": self.noise_std,
            "rate": self.rate,
            "steps": self.steps,
        }

    def to_json(self) -> dict[str, Any]:
        """The slot as plain JSON values."""
        spec = self.spec()
        spec["name"] = spec.pop("mechanism")
        return {"id": self.id, "spare": self.spare, **spec}

    @classmethod
    def from_json(cls, obj: dict[str, Any]) -> "Slot":
        """Inverse of `to_json`. Raises KeyError, TypeError or ValueError on anything else."""
        known = dict(obj)
        spec = known.pop("statistic").items()
        statistic = _statistic(tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in spec))
        return cls(statistic=statistic, **known)


@lru_cache(maxsize=64)
def _statistic(items: tuple[tuple[str, Any], ...]) -> Statistic:
    """Many slots share one statistic: it is read once."""
    return statistic_from_json(dict(items))


@lru_cache(maxsize=64)
def _statistic_json(statistic: Statistic) -> dict[str, Any]:
    return statistic.to_json()


@dataclass(frozen=True)
class Lock:
    """A verified plan, frozen. `budget` holds epsilon, delta, adjacency and unit.

    `epsilon` is the pessimistic composed value of all slots, spares included, at
    `budget["delta"] - delta_slack`; `delta_slack` pays for discrete noise.
    `unsafe_seed` is not None only under an `--unsafe-...` flag. `allocation`: how training's clip
    and noise differ by time bucket, and the candidates it was chosen from; None for one clip.
    """

    plan_hash: str
    facts: dict[str, Any]
    budget: dict[str, Any]
    slots: tuple[Slot, ...]
    epsilon: float
    optimistic: float
    by_stage: dict[str, Any]
    checks: dict[str, Any]
    delta_slack: float
    versions: dict[str, str]
    unsafe_seed: int | None = None
    allocation: dict[str, Any] | None = None
    lock_hash: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not self.lock_hash:
            object.__setattr__(self, "lock_hash", sha256_bytes(canonical_json(self._body)))

    @cached_property
    def _body(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "plan_hash": self.plan_hash,
            "facts": self.facts,
            "budget": self.budget,
            "slots": [slot.to_json() for slot in self.slots],
            "epsilon": self.epsilon,
            "optimistic": self.optimistic,
            "by_stage": self.by_stage,
            "checks": self.checks,
            "delta_slack": self.delta_slack,
            "versions": self.versions,
            "unsafe_seed": self.unsafe_seed,
            # Absent where there is none: locks of plans without it stay as they always were.
            **({} if self.allocation is None else {"allocation": self.allocation}),
        }

    @property
    def provisional(self) -> bool:
        """Whether the plan's allocation by time bucket is still to be chosen: nothing may spend."""
        said: object = self.allocation  # a lock that was read may hold anything
        return said is not None and not (isinstance(said, dict) and said.get("profile") is not None)

    @property
    def noise_source(self) -> str:
        """What charges must say of their randomness: "os-entropy" or "UNSAFE-seed"."""
        return "os-entropy" if self.unsafe_seed is None else "UNSAFE-seed"

    @property
    def last_stage(self) -> str:
        """The stage that is charged last, in planned order: it closes the transcript."""
        return self.slots[-1].stage if self.slots else ""

    def stage_slots(self, stage: str) -> tuple[Slot, ...]:
        """Slots of one stage, in planned order, spares last."""
        own = [slot for slot in self.slots if slot.stage == stage]
        return tuple(sorted(own, key=lambda slot: slot.spare))

    def releases(self, stage: str) -> dict[str, list[Slot]]:
        """Slots of one stage by the release they serve, in planned order, spares last."""
        groups: dict[str, list[Slot]] = {}
        for slot in self.stage_slots(stage):
            groups.setdefault(slot.release, []).append(slot)
        return groups

    def to_json(self) -> dict[str, Any]:
        """The lock as plain JSON values, with its own hash."""
        return {**self._body, "lock_hash": self.lock_hash}


def write_lock(path: Path, lock: Lock) -> None:
    """Write the lock atomically."""
    data = readable_json(lock.to_json())
    reach("lock:before")
    write_atomic(path, data)
    reach("lock:renamed")


def read_lock(path: Path) -> Lock:
    """Read a lock and check it against its own hash.

    Raises:
        MissingError: there is no file.
        ReplayError: any byte differs from what `write_lock` wrote.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise MissingError(
            f"{path.name} is missing from {path.parent.name or path.parent}/",
            hint="dpsynth plan PLAN.yaml",
        ) from None
    except OSError as error:
        raise ReplayError(f"cannot read {path.name}: {error.strerror}") from error
    return _parse(path.name, data)


def _parse(name: str, data: bytes) -> Lock:
    try:
        body = json.loads(data)
        version = body.pop("format")
        if version != FORMAT:
            raise ReplayError(
                f"{name} has format {version!r}; this dpsynth reads format {FORMAT}",
                hint="use the dpsynth version named in the lock",
            )
        slots = tuple(Slot.from_json(slot) for slot in body.pop("slots"))
        said = body.pop("lock_hash")
        lock = Lock(slots=slots, **body)
        same = lock.lock_hash == said and readable_json(lock.to_json()) == data
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ReplayError(f"{name} is damaged: it is not a lock file", hint=_HINT) from error
    if not same:
        raise ReplayError(f"{name} was edited: it does not match its own hash", hint=_HINT)
    return lock
