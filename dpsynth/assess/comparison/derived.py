"""A plan with another epsilon, made of a plan file: the rest stays as it is written there."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from dpsynth.planning.schema import Plan
from dpsynth.planning.yaml_plan import load_plan, parse_plan, plan_values

_MOST = 64  # characters of a plan's name


@dataclass(frozen=True)
class Derived:
    """A plan file that is yet to be written: its place, its text, and the plan that it says."""

    path: Path
    text: str
    plan: Plan


def with_epsilon(file: Path, epsilon: float, folder: Path) -> Derived | None:
    """The plan of `file` under another epsilon, as a file of `folder`; None where it has that one.

    Only the name and the epsilon differ, and relative paths become absolute.

    Raises PlanError where the plan cannot be read, or has no such budget.
    """
    plan = load_plan(file)
    if plan.budget.epsilon == epsilon:
        return None
    values = _absolute(plan_values(file), plan)
    values["name"] = name_with(plan.name, epsilon)
    values["budget"] = {**values["budget"], "epsilon": epsilon}
    path = folder / f"{values['name']}.yaml"
    head = f"# Made by dpsynth compare of {_one_line(file.name)}: its plan at epsilon {epsilon:g}."
    text = f"{head}\n{json.dumps(values, indent=1)}\n"  # JSON is YAML
    return Derived(path, text, parse_plan(text, str(path)))


def name_with(name: str, epsilon: float) -> str:
    """The name of a derived plan, no longer than a plan's name may be.

    >>> name_with("mnist-merf", 0.3), name_with("a-eps-1", 3.0)
    ('mnist-merf-eps-0.3', 'a-eps-3')
    """
    tail = f"-eps-{epsilon:g}".replace("+", "")
    return stem_of(name)[: _MOST - len(tail)] + tail


def stem_of(name: str) -> str:
    """A plan's name without a last `-eps-E`.

    >>> stem_of("mnist-merf-eps-0.3"), stem_of("mnist-eps-1e-05"), stem_of("deps-1")
    ('mnist-merf', 'mnist', 'deps-1')
    """
    stem, mark, tail = name.rpartition("-eps-")
    return stem if mark and stem and _is_number(tail) else name


def _is_number(text: str) -> bool:
    try:
        return float(text) > 0
    except ValueError:
        return False


def _absolute(values: Any, said: Any) -> Any:
    """Values as written, each path in the place where the loaded plan `said` has it."""
    if isinstance(said, Path):
        return os.fspath(said)
    if isinstance(values, dict) and isinstance(said, BaseModel):
        return {key: _absolute(value, getattr(said, key, None)) for key, value in values.items()}
    if isinstance(values, list) and isinstance(said, list):
        return [_absolute(value, one) for value, one in zip(values, said, strict=True)]
    return values


def _one_line(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)
