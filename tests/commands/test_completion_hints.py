"""What `dpsynth complete-wavelet` says comes next, by where the images lie."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from dpsynth.commands.complete_wavelet import _say_next


@pytest.mark.parametrize(
    ("folder", "following"),
    [
        ("runs/a/released/samples-mine", "dpsynth evaluate runs/a --model mine"),
        ("done here", "dpsynth evaluate runs/a --samples 'done here'"),
    ],
)
def test_images_that_are_no_step_of_the_plan_are_measured_by_their_name(
    folder: str, following: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root = Path("runs/a")
    verified = SimpleNamespace(run=SimpleNamespace(root=root, released=root / "released"))
    _say_next(verified, Path(folder))  # type: ignore[arg-type]
    assert capsys.readouterr().err == f"next: {following}\n"
