"""Public rooms that runs share: one for all plans whose public stages are the same.

What `pretrain` makes hangs on few of a plan's keys. Plans that agree on them get copies of one
room, and the rooms of one space are made in one process that reads and encodes public images once.
"""

import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

DISTILLED = ("horizon", "cap")


def key_of(plan: dict[str, Any]) -> str:
    """Hash of all that decides a plan's public room; `plan` as plain values."""
    from dpsynth.artifacts.files import canonical_json, sha256_bytes

    moments, train = plan["stages"].get("moments"), plan["stages"].get("train") or {}
    known: dict[str, Any] = {
        key: plan[key] for key in ("public", "representation", "velocity", "prior")
    }
    known["private"] = {key: plan["private"].get(key) for key in ("image", "classes", "captions")}
    if moments is not None:
        names = ("covariance", "rank", "floor", "projection", "captions")
        known["moments"] = {name: moments.get(name) for name in names}
        known["cells"] = "cells" in moments
    if "allocation" in train:
        known["train"] = [train["allocation"], train["buckets"]]
        taught = plan.get("distillation")
        known["taught"] = taught and {key: taught.get(key) for key in DISTILLED}
    if plan["sampling"]["method"] == "guide":
        known["guide"] = {key: plan["sampling"][key] for key in ("steps", "guidance")}
    return sha256_bytes(canonical_json(known))


def make(entries: Sequence[dict[str, str]]) -> None:
    """`pretrain` of every entry (plan, run), one after another; each takes over what fits it.

    The first takes nothing; the others the room of the first whose backbone is theirs, else the
    first of all: what differs from it is made anew, by `pretrain`'s own rule.
    """
    import json

    from dpsynth.planning.verify import make_run
    from dpsynth.public.pretrain import pretrain

    made: dict[str, Path] = {}
    with remembered():
        for entry in entries:
            run, plan = Path(entry["run"]), Path(entry["plan"])
            whole = json.loads(plan.read_text())
            backbone = json.dumps([whole["velocity"], whole["private"].get("captions")])
            near = made.get(backbone)
            if near is None and made:
                near = next(iter(made.values()))
            verified = make_run(plan, run)
            if near is not None and not (run / "public/calibration.json").exists():
                take(near, run, prior=backbone in made)
            pretrain(verified)
            made.setdefault(backbone, run)
            (run / "done").touch()


def take(room: Path, run: Path, *, prior: bool = True) -> None:
    """Copy a public room into a run's; without its velocity prior where that is another's."""
    left = shutil.ignore_patterns() if prior else shutil.ignore_patterns("prior.safetensors")
    shutil.copytree(room / "public", run / "public", dirs_exist_ok=True, ignore=left)


@contextmanager
def remembered() -> Iterator[None]:
    """Inside, `pretrain` reads public images, alters and encodes them once for plans alike in it.

    Speed alone: what these functions return is what they would have returned.
    """
    from dpsynth.public import pretrain as stage

    def of_plan(plan: Any, *_: Any) -> str:
        captions = plan.private.captions
        facts = [[source.model_dump_json() for source in plan.public], captions is None]
        return repr([facts, plan.representation.model_dump_json(), plan.public_seed])

    def of_codes(representation: Any, *images: Any) -> tuple[int, ...]:
        return (len(images), *(id(array) for array in images), representation.dim)

    with ExitStack() as stack:
        for name, key in (
            ("read_public", of_plan),
            ("augmented", of_plan),
            ("codes_of", of_codes),
        ):
            known = once(getattr(stage, name), key)
            stack.enter_context(patch.object(stage, name, known))
        yield


def once(function: Callable[..., Any], key: Callable[..., Any]) -> Callable[..., Any]:
    """The function, called once for each key of its arguments."""
    kept: dict[Any, Any] = {}

    def known(*arguments: Any) -> Any:
        name = key(*arguments)
        if name not in kept:
            kept[name] = function(*arguments)
        return kept[name]

    return known


@contextmanager
def kept_codes(folder: Path) -> Iterator[None]:
    """Inside, an autoencoder's exact codes of records are kept in `folder` and read again.

    Speed alone, and for data that are public, as those of the tables: nobody else may write such
    codes down. A code is a function of its record alone, so that what is read is what would have
    been computed.
    """
    from dpsynth.public.representation import Representation

    encode = Representation.encode_exact_many
    names: dict[int, str] = {}

    def known(self: Representation, images: Any) -> Any:
        if self.elementwise:  # pixels: as quick as reading
            return encode(self, images)
        if id(self) not in names:
            names[id(self)] = identity(self)
        digest = hashlib.sha256(names[id(self)].encode() + np.ascontiguousarray(images).tobytes())
        path = folder / f"{digest.hexdigest()}.npy"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.part")
            with part.open("wb") as file:
                np.save(file, encode(self, images))
            part.rename(path)
        return np.load(path)

    with patch.object(Representation, "encode_exact_many", known):
        yield


def identity(representation: Any) -> str:
    """Hash of all that decides a code."""
    digest = hashlib.sha256(repr([representation.shape, representation.scale]).encode())
    digest.update(representation.mean.tobytes())
    for name, array in sorted(representation.codec.arrays().items()):
        digest.update(name.encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
