"""The task that a plan trains privately."""

from dpsynth.artifacts.lock import Lock
from dpsynth.artifacts.rooms import RunDir
from dpsynth.artifacts.trained import on_tokens
from dpsynth.planning.schema import Plan
from dpsynth.private.flow_task import FlowTask
from dpsynth.private.task import Task
from dpsynth.private.token_task import TokenTask


def load_task(run: RunDir, plan: Plan, lock: Lock) -> Task:
    """The flow or spectral tokens, from the run's own start weights. Opens no private data.

    Raises:
        PlanError: no train stage, or one that does not fit.
        MissingError: an earlier step has not run.
        UsageError, ReplayError: a public file is not the one that was calibrated.
    """
    if on_tokens(lock):
        return TokenTask.load(run, plan)
    return FlowTask.load(run, plan, lock)
