"""Which file each charge pays for, and whether what lies in `released/` is what was settled.

A release in rounds has a file for each round, and each later round rests on the earlier ones:
so their charges come in order, and a file without its charge is never used or handed out.
"""

from collections.abc import Iterable
from pathlib import Path

from dpsynth.artifacts.adapter import DIFFUSERS, FOLDER, PEFT
from dpsynth.artifacts.files import sha256_file
from dpsynth.artifacts.lock import Lock
from dpsynth.artifacts.rooms import TRANSCRIPT_NAME, RunDir
from dpsynth.artifacts.transcript import Line, parse_transcript
from dpsynth.artifacts.votes import MOST_ROUNDS, population_name, votes_name
from dpsynth.errors import BudgetError, MissingError, ReplayError, typed

MODEL = "model.safetensors"
"""What DP-SGD made: some charge of its stage must have paid for it. Its chunks settle with
checkpoints in the curator's room, so that no line names its hash."""

DERIVED = (
    "mixture.safetensors",
    "distilled.safetensors",
    "generator.safetensors",
    "warm.safetensors",
    *(population_name(number) for number in range(MOST_ROUNDS + 1)),
    *(f"{FOLDER}/{name}" for name in (PEFT, DIFFUSERS)),
    "public/geometry.safetensors",
    "public/within.safetensors",
    "public/projection.safetensors",
    "public/features.safetensors",
    "public/tokenizer.safetensors",
    "public/transformer.safetensors",
    "public/feature-map.safetensors",
    "public/vote-features.safetensors",
    "coarse/tokens.safetensors",
)
"""Arrays of a hand-out that are made without a look at private records, by their path in it."""


FOLLOWS = {
    "generator.safetensors": "embedding.safetensors",
    "warm.safetensors": "central.safetensors",
    **{population_name(n): votes_name(n) for n in range(1, MOST_ROUNDS + 1)},
}
"""The release that each of these derived arrays is made of: some charge must have settled it."""


def file_of(stage: str, mechanism: str) -> str:
    """File that a charge's mechanism releases into; a spare's is that of what it spares.

    A cell round has a file of its own; the paper's mechanisms share one.

    >>> file_of("moments", "cells-lloyd-1-spare-2")
    'cells-lloyd-1.safetensors'
    >>> file_of("moments", "cross-moments-second-spare-1")
    'cross-moments.safetensors'
    >>> file_of("evaluation", "confusion-spare-1")
    'confusion.safetensors'
    """
    if stage == "train":
        return MODEL
    release = mechanism.split("-spare-", maxsplit=1)[0]
    for shared in ("moments", "cross-moments"):
        if release.startswith(f"{shared}-"):
            return f"{shared}.safetensors"
    return f"{release}.safetensors"


def made_files(released: Path) -> list[Path]:
    """Files that only a look at private records makes, whichever rounds they say they are."""
    return [
        path
        for pattern in (
            "moments*.safetensors",
            "cross-moments*.safetensors",
            "cells*.safetensors",
            "confusion*.safetensors",
            "embedding*.safetensors",
            "votes*.safetensors",
            "central*.safetensors",
            MODEL,
        )
        for path in sorted(released.glob(pattern))
        if path.is_file()
    ]


def settled_files(lines: Iterable[Line]) -> dict[str, set[str]]:
    """Each charged file by name, and the SHA-256s that it settled with: none, while unsettled."""
    paid: dict[int, str] = {}
    found: dict[str, set[str]] = {}
    for line in lines:
        if line["kind"] == "charge":
            paid[line["slot"]] = file_of(str(line["stage"]), str(line["mechanism"]))
            found.setdefault(paid[line["slot"]], set())
        if line["kind"] == "settle" and paid[line["slot"]] != MODEL:
            found[paid[line["slot"]]].add(line["sha256"])
    return found


def earlier_files(lock: Lock) -> dict[str, frozenset[str]]:
    """For each file, those that rounds before it in its stage settle. Releases of one file are one.

    Steps of DP-SGD make one file, and so wait for nothing here.
    """
    stages: dict[str, list[str]] = {}
    for slot in lock.slots:
        names = stages.setdefault(slot.stage, [])
        name = file_of(slot.stage, slot.name)
        if name not in names:
            names.append(name)
    return {
        name: frozenset(names[:number])
        for names in stages.values()
        for number, name in enumerate(names)
    }


def out_of_order(lock: Lock, lines: Iterable[Line]) -> Line | None:
    """The first charge that comes before an earlier round of its stage settled, if any does."""
    earlier = earlier_files(lock)
    paid: dict[int, str] = {}
    settled: set[str] = set()
    for line in lines:
        if line["kind"] == "charge":
            name = file_of(str(line["stage"]), str(line["mechanism"]))
            if not earlier.get(name, frozenset()) <= settled:
                return line
            paid[line["slot"]] = name
        if line["kind"] == "settle":
            settled.add(paid[line["slot"]])
    return None


def require_grown(run: RunDir) -> None:
    """Refuse a transcript that was cut or replaced: `released/` would hold what it never charged.

    A file that is charged and not settled passes: a crash may have come between the two, and the
    release's spare overwrites it.

    Raises BudgetError unless it begins with its handed-out copy, is there where arrays are (but for
    a public generator's first population, which comes before every charge), and charged every file
    that a look at private records makes, with the hash that it settled.
    """
    # The transcript last: it may grow meanwhile, and is ahead of whatever it charges.
    made, copy = made_files(run.released), run.released / TRANSCRIPT_NAME
    handed = copy.read_bytes() if copy.is_file() else b""
    known = run.transcript.read_bytes() if run.transcript.is_file() else b""
    arrays = {path.name for path in run.released.glob("*.safetensors")} - {population_name(0)}
    if not known.startswith(handed) or (not known and arrays):
        raise _rolled_back("released/ holds what an earlier transcript of this run charged")
    paid = settled_files(parse_transcript(known).lines) if made else {}
    for path in made:
        digests = paid.get(path.name)
        if digests is None:
            raise _rolled_back(f"released/{path.name} is what an earlier transcript charged")
        if digests and sha256_file(path) not in digests:
            raise BudgetError(
                f"released/{path.name} is not what the transcript settled",
                hint="restore the file, or its transcript; or plan a new run (its budget adds up)",
            )


def _rolled_back(what: str) -> BudgetError:
    return BudgetError(
        f"{what}, and that is gone",
        hint=f"restore {TRANSCRIPT_NAME} (of a copy, or from released/), or plan into a new "
        "run folder: dpsynth plan PLAN --run runs/NAME-2 (its budget adds up)",
    )


def charged_calibrations(lines: Iterable[Line]) -> set[str]:
    """The SHA-256s of the calibration that charges name: one, unless something is wrong."""
    return {str(line["calibration_hash"]) for line in lines if line["kind"] == "charge"}


def require_calibration(run: RunDir) -> None:
    """Refuse to work by another calibration than the one that the run's charges name.

    Raises ReplayError: it changed after the first charge, so released values mean something else.
    """
    if not (run.transcript.is_file() and run.calibration.is_file()):
        return
    named = charged_calibrations(parse_transcript(run.transcript.read_bytes()).lines)
    if named and sha256_file(run.calibration) not in named:
        raise ReplayError(
            "public/calibration.json is not the one that the charges name",
            hint="restore it: released/public/ holds a copy once something was handed out",
        )


def _maker(name: str) -> str:
    """The command that makes a round's file."""
    makers = {
        "confusion": "release-evaluation",
        "embedding": "release-embedding",
        "votes": "evolve",
        "central": "release-central",
    }
    found = (by for start, by in makers.items() if name.startswith(start))
    return next(found, "release-moments")


def require_settled(run: RunDir, names: Iterable[str]) -> None:
    """Files of `released/` are what the run's transcript settled, where it has a transcript.

    `names`: rounds' files; the model, which no line names by hash, is passed over.

    Raises:
        MissingError: a file is gone.
        ReplayError: no charge settled it, or it is another one by now.
    """
    if not run.transcript.is_file():
        return
    settled = settled_files(parse_transcript(run.transcript.read_bytes()).lines)
    for name in names:
        path, digests = run.released / name, settled.get(name)
        if name == MODEL:
            continue
        if not path.is_file():
            raise MissingError(f"{name} is missing from released/", hint="restore the file")
        if not digests:
            raise ReplayError(
                f"{name} was never settled: a crash came between the file and its line",
                hint=f"{typed('dpsynth', _maker(name), run.root)} makes it anew, paid for by "
                "its spare; dpsynth close RUN removes it",
            )
        if sha256_file(path) not in digests:
            raise ReplayError(
                f"{name} is not what the transcript settled",
                hint="restore the file, or plan a new run (its budget adds up)",
            )
