"""Help: light, fresh in docs, and with an example for every command."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dpsynth.commands import _help_pages

ROOT = Path(__file__).parents[2]
HEAVY = ["numpy", "pydantic", "torch", "scipy", "yaml", "dp_accounting", "PIL", "opacus"]
PAGES = _help_pages.pages()
COMMANDS = sorted(name.removesuffix(".md") for name in PAGES if name != "README.md")


def test_every_command_is_there() -> None:
    assert COMMANDS == [
        "audit", "check", "close", "compare", "complete-wavelet", "evaluate", "evolve", "guide",
        "plan", "pretrain", "reference", "release-central", "release-embedding",
        "release-evaluation", "release-moments", "replay", "report", "run", "sample", "status",
        "train",
    ]  # fmt: skip


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    program = (
        "import json, sys\nfrom dpsynth.cli import main\n"
        "try:\n    main()\nexcept SystemExit as e:\n    assert not e.code\n"
        "print(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    loaded = set(json.loads(done.stderr.splitlines()[-1]))
    own = {"pydantic"} if "train" in arguments else set()  # typer's, to read a parameter
    assert not loaded & set(HEAVY) - own
    assert done.stdout.strip()


def test_the_pages_in_docs_are_fresh() -> None:
    assert _help_pages.stale(ROOT / "docs" / "commands") == []


def test_a_stale_page_is_noticed(tmp_path: Path) -> None:
    _help_pages.write(tmp_path)
    assert _help_pages.stale(tmp_path) == []
    (tmp_path / "plan.md").write_text("old")
    (tmp_path / "gone.md").write_text("no such command")
    (tmp_path / "run.md").unlink()
    assert _help_pages.stale(tmp_path) == ["gone.md", "plan.md", "run.md"]
    assert _help_pages.main([str(tmp_path), "--check"]) == 1
    assert _help_pages.main([str(tmp_path)]) == 0
    assert _help_pages.main([str(tmp_path), "--check"]) == 0
    assert _help_pages.main([]) == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_every_page_has_an_example_and_json(command: str) -> None:
    page = PAGES[f"{command}.md"]
    assert re.search(rf"Example: dpsynth {command} ", page)
    assert "--json" in page
    assert "--unsafe" not in page


def test_the_panels_are_the_rooms() -> None:
    for room in ("Plan:", "Public data:", "Spends budget:", "Post-processing:", "Looks (curator"):
        assert room in PAGES["README.md"]
