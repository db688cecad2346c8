"""Public files that were lost or damaged after a charge, put back from the hand-out's copies."""

from dpsynth.artifacts.files import read_json, sha256_file, write_atomic
from dpsynth.artifacts.rooms import RunDir
from dpsynth.artifacts.settled import charged_calibrations
from dpsynth.artifacts.transcript import parse_transcript
from dpsynth.console import note
from dpsynth.errors import DpsynthError

_SUFFIX = "_sha256"


def put_back(run: RunDir) -> None:
    """Replace files of `public/` that are not what the charges, or the calibration, name by hash.

    Only by a copy in `released/public/` that is: then nothing changes. The rest is left as it is.
    """
    if not run.transcript.is_file():
        return
    try:
        named = charged_calibrations(parse_transcript(run.transcript.read_bytes()).lines)
    except DpsynthError:  # whoever spends or replays says so
        return
    _put_back(run, run.calibration.name, named)
    try:
        facts = read_json(run.calibration)
    except DpsynthError:  # lost, and no copy: pretrain says what that means
        return
    for key, digest in facts.items():
        if key.endswith(_SUFFIX):
            _put_back(run, f"{key.removesuffix(_SUFFIX)}.safetensors", {digest})


def _put_back(run: RunDir, name: str, wanted: set[str]) -> None:
    path, copy = run.public / name, run.released / "public" / name
    if not wanted or (path.is_file() and sha256_file(path) in wanted):
        return
    if copy.is_file() and sha256_file(copy) in wanted:
        write_atomic(path, copy.read_bytes())
        note(f"{name}: lost or damaged, put back from released/public/")
