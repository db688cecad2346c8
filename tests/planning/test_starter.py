"""The starter plan is a plan, and never overwrites one."""

from pathlib import Path

import pytest

from dpsynth.errors import UsageError
from dpsynth.planning.starter import STARTER, write_starter
from dpsynth.planning.verify import verify, warnings
from dpsynth.planning.yaml_plan import load_plan, parse_plan


def test_the_starter_loads_and_verifies(tmp_path: Path) -> None:
    plan = load_plan(write_starter(tmp_path / "plan.yaml"))
    assert verify(plan).epsilon <= 1.0
    assert not warnings(plan)


def test_the_starter_says_true_things_when_its_comments_are_taken_up() -> None:
    """Each commented option can be switched on."""
    text = STARTER.replace("  # train:", "  train:").replace("method: release ", "method: flow ")
    for line in ("weight: 0.1", "rate: 0.02", "steps: 500"):
        text = text.replace(f"  #   {line}", f"    {line}")
    text = text.replace("# distillation:", "distillation:").replace("  # cap:", "  cap:")
    plan = parse_plan(text.replace("  # - {kind: folder", "  - {kind: folder"))
    assert plan.stages.train is not None
    assert plan.private.cap is not None
    assert plan.sampling.method == "flow"


def test_the_starter_overwrites_nothing(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("mine")
    with pytest.raises(UsageError) as caught:
        write_starter(path)
    assert path.read_text() == "mine"
    assert caught.value.exit_code == 2
    with pytest.raises(UsageError):
        write_starter(tmp_path / "absent" / "plan.yaml")
