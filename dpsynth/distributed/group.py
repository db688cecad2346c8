"""Several processes over torch.distributed: gloo for tensors on the CPU, NCCL for those on a GPU.

A process that dies closes its connections, so that the others' collective fails at once; one that
fails in Python first leaves word in the store, where the others look before they say anything.
"""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from dpsynth.distributed.environment import HOW, Place
from dpsynth.distributed.ranks import Ranks, Whole, widest
from dpsynth.errors import DpsynthError, RankError, UsageError

T = TypeVar("T")
RESUME = (
    "type the same torchrun command again: it goes on after the last settled slot "
    "(dpsynth status RUN says what is spent)"
)
# A wait returns to Python this often, so that signals are heard.
_SLICE = timedelta(seconds=0.5)
_POLL = 2e-4
# No limit of torch's own: loss is seen by closed connections, and patience is counted here.
_FOREVER = timedelta(days=365)
_ERROR, _TOLD, _HERE, _ALL, _LEFT = "error", "told", "here", "all", "left"
_LINGER = 2.0
_EXACT = 2.0**52
# Whole numbers travel in two parts, the lower one of 40 bits: up to 2^23 of those fit int64.
_LIMB = 40


class Group(Ranks):
    """This process and the others of one run."""

    def __init__(self, place: Place, store: Store, patience: float) -> None:
        """`patience`: seconds that a collective waits for a process that neither comes nor dies."""
        self.rank, self.world = place.rank, place.world
        self._store, self._patience = store, patience
        self._waiting = False  # in a collective that has not ended: then nothing can be closed

    @classmethod
    def join(cls, place: Place, *, patience: float, meeting: float) -> "Group":
        """Meet the other processes; each has `meeting` seconds to come.

        Raises:
            RankError: not all of them came, or the meeting point cannot be reached.
        """
        limit = timedelta(seconds=meeting)
        if _gpus():
            torch.cuda.set_device(place.local_rank % torch.cuda.device_count())
        try:
            store, _, _ = next(rendezvous("env://", timeout=limit))
            group = cls(place, PrefixStore("dpsynth", store), patience)
            group._meet(limit)
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if _gpus() else "gloo",  # a tensor's device chooses
                store=PrefixStore("torch", store),
                rank=place.rank,
                world_size=place.world,
                timeout=_FOREVER,
            )
            group.barrier()
        except (RuntimeError, ValueError) as error:
            raise RankError(
                f"process {place.rank} did not meet the other {place.world - 1} at "
                f"{place.address}:{place.port} within {meeting:g} s",
                hint=f"start all {place.world} of them: {HOW}",
            ) from error
        return group

    def _meet(self, limit: timedelta) -> None:
        if self._store.add(_HERE, 1) == self.world:
            self._store.set(_ALL, "here")
        self._store.wait([_ALL], limit)

    def leave(self) -> None:
        """End together. Called when all went well."""
        self.barrier()
        dist.destroy_process_group()

    def abandon(self, error: BaseException) -> None:
        """Leave word of what ends this process; its closed connections then end the others."""
        try:
            if not isinstance(error, RankError):  # had, not heard of
                code = error.exit_code if isinstance(error, DpsynthError) else RankError.exit_code
                word = json.dumps({"rank": self.rank, "exit_code": code})
                self._store.compare_set(_ERROR, "", word)
            if not self._waiting:
                dist.destroy_process_group()
            self._linger()
        except RuntimeError:
            return  # the store went first: the others see closed connections

    def _linger(self) -> None:
        """Where the main process keeps the store itself, let the others read the word in it."""
        if self._store.add(_LEFT, 1) == self.world or not self.is_main:
            return
        until = time.monotonic() + (0 if _torchrun_keeps_the_store() else _LINGER)
        while time.monotonic() < until and self._store.add(_LEFT, 0) < self.world:
            time.sleep(0.01)

    def barrier(self) -> None:
        """Wait until every process is here."""
        self._finish(dist.all_reduce, torch.zeros(1), patience=self._patience)

    def lead(self, work: Callable[[], T]) -> T | None:
        """As of `Ranks.lead`."""
        if not self.is_main:
            self._obey(self._hear(None, patience=None))
            return None
        try:
            done = work()
        except BaseException as error:
            code = error.exit_code if isinstance(error, DpsynthError) else RankError.exit_code
            self._hear(_packed({_ERROR: code}), patience=self._patience)
            raise
        self._hear(_packed({}), patience=self._patience)
        return done

    def _obey(self, answer: bytes) -> None:
        code = json.loads(answer).get(_ERROR)
        if code is not None:
            raise _told(0, code)

    def tell(self, message: dict[str, Any] | None) -> dict[str, Any]:
        """As of `Ranks.tell`. The others wait without a limit: the main process may be at work."""
        told = self._hear(_packed(message or {}) if self.is_main else None, patience=None)
        found: dict[str, Any] = json.loads(told)
        return found

    def tell_bytes(self, data: bytes | None) -> bytes:
        """As of `Ranks.tell_bytes`."""
        return self._hear((data or b"") if self.is_main else None, patience=None)

    def _hear(self, data: bytes | None, patience: float | None) -> bytes:
        """The main process's `data` in every process; the others give None."""
        size = torch.tensor([0 if data is None else len(data)])
        self._finish(dist.broadcast, size, src=0, patience=patience)
        body = torch.zeros(int(size), dtype=torch.uint8) if data is None else _bytes(data)
        if len(body):
            self._finish(dist.broadcast, body, src=0, patience=patience)
        return body.numpy().tobytes()

    def gather(self, data: bytes) -> list[bytes]:
        """As of `Ranks.gather`."""
        sizes = torch.zeros(self.world, dtype=torch.int64)
        sizes[self.rank] = len(data)
        self._finish(dist.all_reduce, sizes, patience=None)
        longest = int(sizes.max())
        mine = torch.zeros(longest, dtype=torch.uint8)
        mine[: len(data)] = _bytes(data)
        parts = [torch.zeros_like(mine) for _ in range(self.world)] if self.is_main else None
        if longest:
            self._finish(dist.gather, mine, parts, dst=0, patience=self._patience)
        lengths = sizes.tolist()
        return [
            part[:length].numpy().tobytes()
            for part, length in zip(parts or [], lengths, strict=False)
        ]

    def sum_on_grid(self, tensors: Mapping[str, Tensor], step: float) -> dict[str, Tensor]:
        """As of `Ranks.sum_on_grid`."""
        whole = torch.cat([t.double().reshape(-1) for t in tensors.values()]).div_(step).round_()
        # Written so that a NaN fails too. No value is said: it comes of private records.
        if not bool((whole.abs() <= _EXACT / self.world).all()):
            raise _inexact()
        self._finish(dist.reduce, whole, dst=0, patience=self._patience)
        return _cut(whole.mul_(step), tensors) if self.is_main else {}

    def spread(
        self, tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """As of `Ranks.spread`."""
        kind = widest(like)
        if self.is_main:
            flat = torch.cat([tensors[name].reshape(-1).to(kind) for name in like])
        else:
            count, device = sum(t.numel() for t in like.values()), next(iter(like.values())).device
            flat = torch.empty(count, dtype=kind, device=device)
        self._finish(dist.broadcast, flat, src=0, patience=self._patience)
        return _cut(flat, like)

    def sum_whole(self, arrays: Sequence[Whole]) -> list[Whole]:
        """As of `Ranks.sum_whole`."""
        flat = np.concatenate([np.asarray(a, dtype=object).reshape(-1) for a in arrays])
        if not len(flat):
            return list(arrays) if self.is_main else []
        high, low = flat >> _LIMB, flat & (2**_LIMB - 1)  # v = high 2^40 + low, also below zero
        if max(abs(value) for value in high.tolist()) > 2**62 // self.world:
            raise _inexact()
        limbs = torch.from_numpy(np.stack([high, low]).astype(np.int64))
        self._finish(dist.reduce, limbs, dst=0, patience=self._patience)
        if not self.is_main:
            return []
        high, low = limbs.numpy().astype(object)
        summed, found = (high << _LIMB) + low, list[Whole]()
        for array in arrays:
            head, summed = summed[: array.size], summed[array.size :]
            found.append(head.reshape(array.shape))
        return found

    def require_same(self, what: str, value: str) -> None:
        """As of `Ranks.require_same`."""
        held = self.gather(value.encode())
        answer = self.tell({"same": len(set(held)) == 1} if self.is_main else None)
        if not answer["same"]:
            raise RankError(
                f"the {self.world} processes differ in {what}; nothing goes on from here",
                hint="give all of them the same run folder, records, version and kind of machine, "
                "then " + RESUME,
                told=not self.is_main,
            )

    def _finish(
        self, start: Callable[..., Any], *given: Any, patience: float | None, **named: Any
    ) -> None:
        """Carry out one collective, in slices, so that signals are heard while it waits.

        Raises:
            RankError: a process is lost or failed, or `patience` seconds went by.
        """
        begun, self._waiting = time.monotonic(), True
        try:
            work = start(*given, async_op=True, **named)
            while not _waited(work, given[0].is_cuda):
                if patience is not None and time.monotonic() - begun > patience:
                    raise self._lost(f"did not come within {patience:g} s")
        except RuntimeError as error:
            self._waiting = False
            raise self._lost("ended or cannot be reached") from error
        self._waiting = False

    def _lost(self, how: str) -> RankError:
        """What to raise when another process is gone: its own word if it left one."""
        try:
            if self._store.check([_ERROR]):
                word = json.loads(self._store.get(_ERROR))
                return _told(word["rank"], word["exit_code"])
            told = self._store.add(_TOLD, 1) > 1
        except RuntimeError:
            told = False  # the store is gone with its process: each says it itself
        others = "the other process" if self.world == 2 else f"one of the {self.world} processes"
        return RankError(f"{others} {how}; this one stops too", hint=RESUME, told=told)

    def stopped(self) -> RankError:
        """What to raise when a signal tells this process to end (torchrun does, if one died)."""
        return self._lost("ended, or torchrun was told to stop")


def _torchrun_keeps_the_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _gpus() -> bool:
    return torch.cuda.is_available() and dist.is_nccl_available()


def _waited(work: Any, on_gpu: bool) -> bool:
    """Wait a slice; whether the collective is done. Raises what it failed with."""
    if on_gpu:  # NCCL's own wait blocks a lost peer's mates for good
        until = time.monotonic() + _SLICE.total_seconds()
        while not work.is_completed():
            if time.monotonic() > until:
                return False
            time.sleep(_POLL)
        work.wait()
        return True
    try:
        work.wait(_SLICE)
    except RuntimeError:
        if work.is_completed():
            raise
        return False
    return True


def _told(rank: int, exit_code: int) -> RankError:
    error = RankError(f"process {rank} failed and says why", told=True)
    error.exit_code = exit_code
    return error


def _inexact() -> UsageError:
    return UsageError(
        "a sum over the processes is not finite, or too large to be exact",
        hint="use more processes, so that each holds fewer records",
    )


def _packed(message: dict[str, Any]) -> bytes:
    return json.dumps(message, allow_nan=False).encode()


def _bytes(data: bytes) -> Tensor:
    """uint8 (n,), writable, as the collectives want it."""
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if data
        else torch.zeros(0, dtype=torch.uint8)
    )


def _cut(flat: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for name, tensor in like.items():
        head, flat = flat[: tensor.numel()], flat[tensor.numel() :]
        found[name] = head.view(tensor.shape)
    return found
