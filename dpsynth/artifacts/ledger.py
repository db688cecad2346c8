"""One ledger file per private dataset, beside the runs: every run with its budget.

`runs/ledgers/ID.json` has a random id and lists runs without any path.
`runs/ledgers/.index.json` (mode 0600, never handed out) says which dataset has which id.
A dataset is told apart by where it lies (symlinks followed): copies of the same records
under two paths are two datasets, and adding them up is the custodian's task.
"""

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpsynth.artifacts.files import canonical_json, read_json, storage_error, write_json
from dpsynth.artifacts.rooms import TRANSCRIPT_NAME, RunDir
from dpsynth.console import counted
from dpsynth.errors import BudgetError, MissingError, UsageError

FORMAT = 1
FOLDER = "ledgers"
_PRIVATE = 0o600
# Budgets are decimal numbers: three times 0.1 is not over a cap of 0.3.
_ROUNDING = 1 + 1e-12


@dataclass(frozen=True)
class Entry:
    """One run's budget. `run_id` is the random id in the run's `open` line.

    A run folder deleted and planned again has a new id, so that its spend counts again.
    """

    run_id: str
    run: str
    plan_hash: str
    epsilon: float
    delta: float
    state: str = "open"


@dataclass(frozen=True)
class Ledger:
    """The ledger of one dataset. `dataset` is any text that tells datasets apart."""

    folder: Path
    dataset: str

    @classmethod
    def of(cls, run: RunDir) -> "Ledger":
        """The ledger of a run's private dataset, in the folder that holds the run.

        Raises MissingError when the run does not know where its private source lies.
        """
        path = run.curator / "source.json"
        if not path.exists():
            raise MissingError(
                "the run does not know its private source", hint="dpsynth plan PLAN --run RUN"
            )
        known = read_json(path)
        return cls.beside(run.root, dataset_text(known["private"], known.get("override")))

    @classmethod
    def beside(cls, run_root: Path, dataset: str) -> "Ledger":
        """The ledger of `dataset` for runs that lie in the same folder as `run_root`."""
        return cls(run_root.resolve().parent / FOLDER, dataset)

    def check(self, epsilon: float, delta: float, cap: dict[str, Any]) -> None:
        """Refuse early (BudgetError) what `enter` would refuse for a run not yet listed."""
        entry = Entry(run_id="", run="", plan_hash="", epsilon=epsilon, delta=delta)
        if self.folder.exists():
            with self._locked():
                _check_cap(entry, self._read(self._file()), cap)
        else:
            _check_cap(entry, {}, cap)

    def enter(self, entry: Entry, cap: dict[str, Any] | None) -> None:
        """List a run (once, however often it is entered), unless the cap forbids it.

        Raises BudgetError when the budgets of all runs, this one included, exceed `cap`
        (keys epsilon and delta): runs chosen one after another add up.
        """
        with self._locked():
            path = self._file()
            runs = self._read(path)
            others = {key: run for key, run in runs.items() if key != entry.run_id}
            self._refuse_copy(entry, runs)
            if cap is not None:
                _check_cap(entry, others, cap)
            row = {
                "run": entry.run,
                "plan_hash": entry.plan_hash,
                "epsilon": entry.epsilon,
                "delta": entry.delta,
                "state": entry.state,
            }
            if runs.get(entry.run_id) != row:
                write_json(path, {"format": FORMAT, "runs": {**others, entry.run_id: row}})

    def _refuse_copy(self, entry: Entry, runs: dict[str, Any]) -> None:
        """A copied run folder would spend the same slots twice under one id."""
        known = runs.get(entry.run_id, {}).get("run", entry.run)
        original = self.folder.parent / known / TRANSCRIPT_NAME
        if known != entry.run and original.exists():
            raise BudgetError(
                f"this run is a copy of {known}, which lies beside it",
                hint=f"spend in {known} alone, or remove it if this one replaces it",
            )

    def entries(self) -> list[Entry]:
        """Every run on this dataset, ordered by id."""
        with self._locked():
            runs = self._read(self._file())
        return [Entry(run_id=key, **run) for key, run in sorted(runs.items())]

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT, _PRIVATE)
        except OSError as error:
            raise storage_error(self.folder / ".lock", error) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _file(self) -> Path:
        """This dataset's file; a new dataset gets a random id that says nothing about it."""
        path = self.folder / ".index.json"
        index = read_json(path) if path.exists() else {}
        if self.dataset not in index:
            index[self.dataset] = secrets.token_hex(16)
            write_json(path, index, mode=_PRIVATE)
        return self.folder / f"{index[self.dataset]}.json"

    def _read(self, path: Path) -> dict[str, Any]:
        if not path.exists():
            return {}
        content = read_json(path)
        runs = content.get("runs")
        if content.get("format") != FORMAT or not isinstance(runs, dict):
            raise UsageError(
                "the dataset's ledger is damaged or of another version",
                hint="restore ledgers/ from a copy; without it no run may spend",
            )
        return runs


def dataset_text(source: dict[str, Any], override: str | None = None) -> str:
    """Text that tells private datasets apart: the files' real paths, or the built-in's kind.

    `source` is the plan's private source; `override` the path of `--private`, if any.

    >>> dataset_text({"kind": "digits"})
    '["digits"]'
    """
    keys = [key for key in ("path", "images", "labels") if key in source]
    if source["kind"] != "idx":
        keys = [key for key in keys if key == "path"]  # an NPZ's other keys name arrays
    paths = [str(source[key]) for key in keys]
    if override is not None and paths:
        paths = _moved(paths, str(override))
    real = [os.path.realpath(path) for path in paths]
    return canonical_json(real or [source["kind"]]).decode()


def _moved(paths: list[str], override: str) -> list[str]:
    if len(paths) == 1:
        return [override]
    parts = override.split(",")
    if len(parts) == len(paths):
        return parts
    return [str(Path(override) / Path(path).name) for path in paths]


def _check_cap(entry: Entry, others: dict[str, Any], cap: dict[str, Any]) -> None:
    earlier = counted(len(others), "earlier run")
    for key, own in (("epsilon", entry.epsilon), ("delta", entry.delta)):
        total = own + sum(run[key] for run in others.values())
        if total > cap[key] * _ROUNDING:
            raise BudgetError(
                f"this run's {key} {own:g} and {earlier} on the same private "
                f"dataset make {total:g}, over the plan's cap of {cap[key]:g}",
                hint="lower the budget in the plan; what earlier runs spent stays spent",
            )
