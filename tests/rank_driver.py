"""Starts the processes of one run as torchrun would, by forking after the slow imports.

A server: each line on stdin is a request (scenario, world, arguments), each line on stdout its
answer (exit codes, what each process wrote to stderr, what it returned).
"""

import hashlib
import json
import os
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

# As `joined` does for a process that has not loaded torch yet.
os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"

import numpy as np
import torch
import torch.distributed
from spendkit import make_lock

import dpsynth.assess.check
import dpsynth.cli
import dpsynth.private.dpsgd
import dpsynth.private.moments
import dpsynth.public.pretrain
import dpsynth.released.sampling
from dpsynth.accounting.statistics import ClippedGradientSum
from dpsynth.artifacts.lock import Slot
from dpsynth.console import note, result
from dpsynth.distributed.joining import joined
from dpsynth.errors import BudgetError, DataError
from dpsynth.models.seeding import generator, seeded_initialisation
from dpsynth.models.velocity import build_velocity
from dpsynth.planning.training import Train
from dpsynth.planning.velocity import Velocity
from dpsynth.private.engine import PerExampleClipper
from dpsynth.private.lattice import RunningSums
from dpsynth.private.steps import PrivateCodes, Workload, flow_losses, run_chunk
from dpsynth.private.together import gathered, give_sums, own_noise, shard, total_sums

DIM, CLASSES = 4, 2
GRID = 2.0**-30


def exchange(ranks, seed=0):
    """Every operation once, on data that follow from the records' numbers alone."""
    mine = list(shard(range(13), ranks, lambda unit: str(unit).encode()))
    rows = np.random.default_rng(seed).normal(size=(13, 7, 3))
    clip = 0.3  # no power of two: multiples of its grid are rounded as floats
    step = clip * GRID
    whole = np.rint(rows[mine].reshape(len(mine), 7, 3) / step).sum(axis=0)
    own = {"a": torch.from_numpy(whole[:, :2] * step), "b": torch.from_numpy(whole[:, 2] * step)}
    total = ranks.sum_on_grid(own, step)
    everywhere = ranks.spread(total, own)
    large = [(-1) ** number * ((number + 1) * 2**80 + number) for number in mine]
    integers = ranks.sum_whole(
        [np.array([sum(large), -sum(mine)], dtype=object), np.zeros((2, 0), dtype=object)]
    )
    ranks.require_same("a constant", "one")
    ranks.barrier()
    return {
        "mine": mine,
        "total": {name: t.numpy().tobytes().hex() for name, t in total.items()},
        "everywhere": {name: t.numpy().tobytes().hex() for name, t in everywhere.items()},
        "integers": [[array.shape, [int(v) for v in array.reshape(-1)]] for array in integers],
        "told": ranks.tell({"slot": 3, "text": "é"} if ranks.is_main else None),
        "bytes": ranks.tell_bytes(bytes(range(256)) * 9 if ranks.is_main else None).hex(),
        "nothing": ranks.tell_bytes(b"" if ranks.is_main else None).hex(),
        "gathered": [part.hex() for part in ranks.gather(bytes([ranks.rank]) * ranks.rank)],
        "led": ranks.lead(lambda: "done"),
        "joined": [a.tolist() for a in gathered([np.array(mine, float), np.zeros(0)], ranks)],
    }


class Recorder:
    """Stands for the state of training: keeps each noisy mean that it is given."""

    def __init__(self, model):
        self.model, self.step, self.means = model, 0, []

    def apply(self, mean):
        self.step += 1
        self.means.append(torch.cat([mean[name].reshape(-1) for name in sorted(mean)]))


class Counting(PerExampleClipper):
    """Keeps the sizes of its batches."""

    def clipped_sum(self, *batch):
        self.sizes.append(len(batch[0]))
        return super().clipped_sum(*batch)


def chunk(ranks, *, steps=200, n=60, rate=0.2, std=3.0, unsafe=None):
    """A chunk of real steps; the clip is so small that the means hold nothing but noise."""
    units = torch.randn(n, DIM, generator=generator(1))
    mine = list(range(ranks.rank, n, ranks.world))
    data = PrivateCodes(units[mine], torch.zeros(len(mine), dtype=torch.int64))
    work = Workload(Train(rate=rate, steps=steps, multiplicity=1), n, CLASSES, 0.4)
    slot = Slot(1, "train", "train-0001", ClippedGradientSum(1e-6), std, rate, steps)
    state = Recorder(net())
    with Counting(state.model, flow_losses, 1e-6) as clipper:
        clipper.sizes = []
        noise = own_noise(make_lock(seed=unsafe), slot.name, ranks)
        log = run_chunk(slot, data, work, state, clipper=clipper, noise=noise, ranks=ranks)
    means = torch.stack(state.means).double() * (rate * n / std)
    return {
        "entries": means.numel(),
        "squares": float(means.square().sum()),
        "bits": hashlib.sha256(means.numpy().tobytes()).hexdigest(),
        "sizes": clipper.sizes,
        "logged": [line["batch"] for line in log],
        "losses": sum(line["loss"] is not None for line in log),
    }


def clipped(ranks, n=24):
    """The sum over one fixed batch: by shards, and in the main process by itself as well."""
    source = generator(2)
    batch = (  # in float64, whose rounding is far below the grid
        torch.randn(n, DIM, generator=source).double(),
        torch.randint(CLASSES, (n,), generator=source),
        torch.rand(n, 2, generator=source).double(),
        torch.randn(n, 2, DIM, generator=source).double(),
    )
    clip, parts = 0.3, [list(range(r, n, ranks.world)) for r in range(ranks.world)]
    step = clip * GRID
    with PerExampleClipper(net().double(), flow_losses, clip) as clipper:
        own = clipper.clipped_sum(*(x[parts[ranks.rank]] for x in batch)).gradients
        total = ranks.sum_on_grid(own, step)
        if not ranks.is_main:
            return None
        shards = [clipper.clipped_sum(*(x[part] for x in batch)).gradients for part in parts]
        whole = clipper.clipped_sum(*batch).gradients
    steps = {name: sum((shard[name] / step).round() for shard in shards) for name in total}
    return {
        "same": all(torch.equal(total[name], steps[name] * step) for name in total),
        "off": max(float(((total[name] - whole[name]) / step).abs().max()) for name in total),
        "moved": max(float(whole[name].abs().max()) / step for name in total),
    }


def net():
    with seeded_initialisation(2):
        return build_velocity(Velocity(width=6, depth=1), DIM, CLASSES)


def moments(ranks, n=50):
    """Exact class sums over shards of codes."""
    rng = np.random.default_rng(4)
    codes, labels = rng.integers(-(2**15), 2**15, (n, 3)), rng.integers(0, 4, n)
    mine = list(shard(range(n), ranks, lambda unit: codes[unit].tobytes()))
    running = RunningSums(4, 3)
    running.add(codes[mine], labels[mine])
    own = running.total()
    if not ranks.is_main:
        return give_sums(own, ranks)
    exact = total_sums(own, ranks)
    parts = (exact.counts, exact.sums, exact.seconds)
    return [[int(v) for v in part.reshape(-1)] for part in parts]


def speak(ranks):
    note(f"note of {ranks.rank}")
    result({"rank": ranks.rank})


def dies(ranks, victim):
    for step in range(50):
        if step == 3 and ranks.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        ranks.barrier()


def dies_while_the_main_one_works(ranks, victim):
    def work():
        time.sleep(0.3)

    if ranks.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    ranks.lead(work)
    ranks.barrier()


def stops(ranks, victim):
    if ranks.rank == victim:
        time.sleep(2.0)
    ranks.barrier()


def is_terminated(ranks, victim):
    if ranks.rank == victim:
        os.kill(os.getpid(), signal.SIGTERM)
    ranks.barrier()


def fails(ranks, victim):
    if ranks.rank == victim:
        raise DataError("the records are damaged", hint="mend them")
    ranks.barrier()


def crashes(ranks, victim):
    if ranks.rank == victim:
        raise ZeroDivisionError
    ranks.barrier()


def leads_to_failure(ranks):
    def work():
        raise BudgetError("released already", hint="plan again")

    ranks.lead(work)


def differs(ranks):
    ranks.require_same("the seed of the world", str(ranks.rank))


def reads_other_records(ranks):
    order = [1, 2, 3, 4] if ranks.rank == 0 else [2, 1, 3, 4]
    list(shard(order, ranks, lambda unit: bytes([unit])))


def sums_too_much(ranks):
    ranks.sum_whole([np.array([2**103 if ranks.rank else 1], dtype=object)])


def sums_no_number(ranks):
    value = float("nan") if ranks.rank else 1.0
    ranks.sum_on_grid({"a": torch.full((2,), value, dtype=torch.float64)}, 1.0)


def _command(rank, words, kill_at=None, dies_in_chunk=None, words_of=None):
    """The command line itself, which joins the others on its own.

    `words_of`: rank -> words of its own. `kill_at`: rank -> a failpoint. `dies_in_chunk`: rank ->
    the chunk of steps in which it dies.
    """
    if str(rank) in (kill_at or {}):
        os.environ["DPSYNTH_KILL_AT"] = kill_at[str(rank)]
    if str(rank) in (dies_in_chunk or {}):
        whole, left = dpsynth.private.dpsgd.run_chunk, [dies_in_chunk[str(rank)]]

        def dying(*given, **named):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return whole(*given, **named)

        dpsynth.private.dpsgd.run_chunk = dying
    sys.argv = ["dpsynth", *(words_of or {}).get(str(rank), words)]
    dpsynth.cli.main()


def _child(request, folder, rank):
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{name}-{rank}", os.O_WRONLY | os.O_CREAT), stream)
    arguments = request.get("arguments", {})
    if request["scenario"] == "command":
        _command(rank, **arguments)
        return
    work = globals()[request["scenario"]]

    def app():
        with joined(**request.get("joined", {})) as ranks:
            answer = work(ranks, **arguments)
        (folder / f"answer-{rank}").write_text(json.dumps(answer))

    dpsynth.cli.app = app  # the command line's own treatment of errors
    dpsynth.cli.main()


def _end(request, folder, rank):
    """Carry out a child and end it, where asked by the interpreter's own slow way out."""
    code = 0
    try:
        _child(request, folder, rank)
    except SystemExit as error:
        code = error.code or 0
    if request["whole_exit"]:
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _serve(request):
    """Fork the processes; in the parent return the answer, in a child end."""
    world, started = request["world"], request.get("started", request["world"])
    folder, port, children = Path(tempfile.mkdtemp()), _free_port(), []
    for rank in range(started):
        child = os.fork()
        if child == 0:
            os.environ.update(
                RANK=str(rank),
                WORLD_SIZE=str(world),
                LOCAL_RANK=str(rank),
                LOCAL_WORLD_SIZE=str(world),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
            )
            _end(request, folder, rank)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    texts = {
        name: [(folder / f"{name}-{rank}").read_text() for rank in range(started)]
        for name in ("out", "err")
    }
    answers = [folder / f"answer-{rank}" for rank in range(started)]
    found = [json.loads(path.read_text()) if path.exists() else None for path in answers]
    return {"codes": codes, "answers": found, **texts}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(_serve(json.loads(line))), flush=True)
