"""Checks on numbers that enter the accounting: each refusal says what was given."""

import math
from collections.abc import Callable
from typing import Any

from dpsynth.errors import UsageError

MOST_NUMBERS = 1_000
"""In one list: clips of a statistic."""


class AccountingError(UsageError, ValueError):
    """A number that no accountant can use. Exit code 2."""


def positive(name: str, value: object) -> float:
    """`value` as a finite float above zero.

    >>> positive("clip", 2)
    2.0
    """
    number = _number(name, value)
    if not (math.isfinite(number) and number > 0):
        raise AccountingError(f"{name} is {value!r}; expected a finite number above zero")
    return number


def positives(name: str, value: object) -> tuple[float, ...]:
    """`value`, a list or tuple of 1 to 1,000 numbers, as finite floats above zero.

    >>> positives("clips", [1, 2.5])
    (1.0, 2.5)
    """
    if not isinstance(value, list | tuple) or not 1 <= len(value) <= MOST_NUMBERS:
        raise AccountingError(f"{name} is {value!r:.80}; expected 1 to {MOST_NUMBERS:,} numbers")
    return tuple(positive(name, number) for number in value)


def open_fraction(name: str, value: object) -> float:
    """`value` as a float strictly between zero and one."""
    number = _number(name, value)
    if not 0 < number < 1:
        raise AccountingError(f"{name} is {value!r}; expected a number above 0 and below 1")
    return number


def sampling_rate(name: str, value: object) -> float:
    """`value` as a float above zero and at most one."""
    number = _number(name, value)
    if not 0 < number <= 1:
        raise AccountingError(f"{name} is {value!r}; expected a number above 0 and at most 1")
    return number


def whole(name: str, value: object) -> int:
    """`value` as an integer from one to 2^53; a bool or a float is refused."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise AccountingError(f"{name} is {value!r}; expected a whole number of at least 1")
    if value > 2**53:
        raise AccountingError(f"{name} is too large; expected at most 2^53")
    return value


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise AccountingError(f"{name} is {value!r}; expected a number")
    try:
        return float(value)
    except OverflowError as error:
        raise AccountingError(f"{name} is too large for a number") from error


def coerce(statistic: Any, **rules: Callable[[str, Any], Any]) -> None:
    """Put each field through its check; frozen values are set once, here."""
    for name, rule in rules.items():
        object.__setattr__(statistic, name, rule(name, getattr(statistic, name)))
