"""Kill `dpsynth run` at random moments after start-up, then resume it: budgets must hold.

    python -m benchmarks.crash [--json] [--kills 50] [--seed N]

A small digits plan with spare release slots runs in a fresh folder; the process is killed
after a random while, the run resumed and killed again, until it finishes; then a new run
starts, until the wanted number of kills is reached. After every kill: the transcript
replays with `--partial`, forgets nothing it held before, and every artifact reads whole.
Exit 1 when anything is off.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from dpsynth.artifacts.files import read_json
from dpsynth.artifacts.lock import read_lock
from dpsynth.artifacts.rooms import RunDir
from dpsynth.artifacts.spending import SpendState, read_state
from dpsynth.artifacts.tensors import load_tensors
from dpsynth.errors import DpsynthError
from dpsynth.planning.replay import replay

PLAN = """\
version: 1
name: crash
budget: {epsilon: 3.0, delta: 1e-5}
private:
  source: {kind: digits}
  public: true
  capacity: 1800
  image: {height: 8, width: 8, channels: 1}
  classes: ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]
  held_out: {by: hash, fraction: 0.28, salt: crash}
public:
  - {kind: letters, count: 600}
representation: {kind: pca, code: 8}
stages:
  moments: {covariance: shared, spares: 3}
  train: {rate: 0.1, steps: 60, chunk: 3, multiplicity: 2, buckets: 2}
velocity: {kind: mlp, width: 16, depth: 1}
prior: {steps: 20}
distillation: {steps: 20}
sampling: {method: flow, count: 200, steps: 4}
evaluation: {probe_epochs: 1, feature_epochs: 1}
"""
# Every crash may forfeit a release slot, and a plan has at most three spares.
MOST_KILLS_A_RUN = 12
NO_SLOT_LEFT = 3


class Trial:
    """One run folder, killed and resumed."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        (folder / "plan.yaml").write_text(PLAN)
        self.run = RunDir(folder / "runs" / "crash")
        self.before = SpendState()
        self.faults: list[str] = []

    def start(self) -> "subprocess.Popen[bytes]":
        """`dpsynth run` on the plan, in a process group of its own."""
        return subprocess.Popen(
            [sys.executable, "-m", "dpsynth", "run", "plan.yaml", "--threads", "1", "--json"],
            cwd=self.folder,
            stdout=subprocess.DEVNULL,
            stderr=(self.folder / "stderr.txt").open("wb"),
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def killed_after(self, seconds: float) -> int | None:
        """Start, kill after `seconds`. The exit code if it ended before, else None."""
        process = self.start()
        try:
            return process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return None

    def check(self, *, partial: bool) -> None:
        """Everything that must hold at any moment; what does not is added to `faults`."""
        if not self.run.lock.exists():
            return
        try:
            state = read_state(self.run, read_lock(self.run.lock))
            self._check_memory(state)
            self._check_files()
            if state.charged:
                self._check_replay(state, partial)
            self.before = state
        except DpsynthError as error:
            self.faults.append(f"{type(error).__name__}: {error.message}")

    def _check_memory(self, state: SpendState) -> None:
        if not (self.before.settled <= state.settled and self.before.charged <= state.charged):
            self.faults.append("a charge or a settlement was forgotten")
        if self.before.forfeited & state.settled and self.before.closed:
            self.faults.append("a forfeited slot came back")

    def _check_replay(self, state: SpendState, partial: bool) -> None:
        (one,) = replay(self.run.transcript, partial=partial).runs
        if one.charges != len(state.charged) or one.epsilon > one.budget["epsilon"]:
            self.faults.append("replay does not agree with the state")

    def _check_files(self) -> None:
        """Every artifact under its own name is whole, and released moments were charged."""
        for path in self.run.root.rglob("*.safetensors"):
            load_tensors(path)
        for path in self.run.root.rglob("*.json"):
            read_json(path)
        moments = self.run.released / "moments.safetensors"
        slots = read_lock(self.run.lock).stage_slots("moments")
        charged = read_state(self.run, read_lock(self.run.lock)).charged
        if moments.exists() and not charged & {slot.id for slot in slots}:
            self.faults.append("moments were released without a charge")


def measured_seconds(folder: Path) -> tuple[float, float]:
    """Seconds to the first lock (start-up) and to the end of an undisturbed run."""
    trial = Trial(folder)
    began = time.monotonic()
    process = trial.start()
    started = 0.0
    while process.poll() is None:
        if not started and trial.run.lock.exists():
            started = time.monotonic() - began
        time.sleep(0.02)
    if process.returncode != 0:
        raise SystemExit((folder / "stderr.txt").read_text())
    trial.check(partial=False)
    if trial.faults:
        raise SystemExit("; ".join(trial.faults))
    return started, time.monotonic() - began


def torment(trial: Trial, kills: int, window: tuple[float, float], chance: random.Random) -> int:
    """Kill and resume one run up to `kills` times, then let it end. How many kills it took.

    `window`: seconds of start-up and of a whole run; a resumed one has less left to do.
    """
    done, (least, left) = 0, window
    while done < kills:
        # Aimed at what is left, and a little short, since a machine's speed varies.
        seconds = chance.uniform(least, max(0.8 * left, 1.2 * least))
        code = trial.killed_after(seconds)
        if code is not None:
            break
        done, left = done + 1, left - (seconds - least)
        trial.check(partial=True)
    else:
        code = trial.start().wait()
    # A run whose spares are all forfeited is refused, with exit 3 and what to do; no more.
    spent_up = code == NO_SLOT_LEFT and not trial.before.settled
    if code != 0 and not spent_up:
        trial.faults.append(
            f"resume ended with {code}: {(trial.folder / 'stderr.txt').read_text()}"
        )
    trial.check(partial=spent_up)
    if code == 0 and not trial.before.closed:
        trial.faults.append("a finished run is not closed")
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=None)
    chosen = parser.parse_args()
    seed = random.SystemRandom().randrange(2**32) if chosen.seed is None else chosen.seed
    chance, kills, runs, faults = random.Random(seed), 0, 0, []
    root = Path(tempfile.mkdtemp(prefix="dpsynth-crash-"))
    window = measured_seconds(root / "undisturbed")
    while kills < chosen.kills:
        trial = Trial(root / f"run-{runs}")
        kills += torment(trial, min(MOST_KILLS_A_RUN, chosen.kills - kills), window, chance)
        runs += 1
        faults += [f"{trial.folder.name}: {fault}" for fault in trial.faults]
        print(f"{kills} kills, {runs} runs, {len(faults)} faults", file=sys.stderr, flush=True)
    found = {"kills": kills, "runs": runs, "seed": seed, "faults": faults}
    if not faults:
        shutil.rmtree(root)
    if chosen.json:
        print(json.dumps(found))
    else:
        print(f"{kills} kills in {runs} runs (seed {seed}): {len(faults)} faults")
        print("\n".join(faults) or "never a spend without a charge, never half a file")
    raise SystemExit(1 if faults else 0)


if __name__ == "__main__":
    main()
