"""Errors that a user can act on, each with the exit code that scripts rely on.

Every message says what was given, what was expected and what to type next, and
never holds a value read from a private record.
"""

import shlex


def typed(*words: object) -> str:
    """A command as a shell takes it, for hints: a path with a space is quoted.

    >>> typed("dpsynth", "check", "my runs/a")
    "dpsynth check 'my runs/a'"
    """
    return shlex.join(map(str, words))


class DpsynthError(Exception):
    """Base of all errors that end a command with one clear message.

    `message` says what was given and what was expected; `hint` what to type next.
    """

    exit_code = 2

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(DpsynthError):
    """A wrong argument, or a step asked for out of order. Exit code 2."""


class PlanError(DpsynthError):
    """The plan cannot be read or says something impossible. Exit code 2."""


class BudgetError(DpsynthError):
    """Over budget, a slot already spent, or a plan changed after its first charge. Exit code 3."""

    exit_code = 3


class ReplayError(DpsynthError):
    """A transcript, lock or hand-out folder does not hold. Exit code 4."""

    exit_code = 4


class DataError(DpsynthError):
    """Records are damaged or do not fit the plan. Exit code 5."""

    exit_code = 5


class MissingError(DpsynthError):
    """An artifact of an earlier step or an optional install is missing. Exit code 6."""

    exit_code = 6


class AuditError(DpsynthError):
    """An attack succeeded, or a positive control was not caught. Exit code 7."""

    exit_code = 7


class RankError(DpsynthError):
    """Another process of this run was lost, failed, or holds other values. Exit code 8.

    `told`: another process says what happened, so that this one ends without a word.
    """

    exit_code = 8

    def __init__(self, message: str, *, hint: str = "", told: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.told = told
