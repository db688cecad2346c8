"""How a command says that it failed: JSON beside `--json`, and a word on SIGTERM."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from test_cli import FAULT, PLAN, dpsynth


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planned")
    (folder / "plan.yaml").write_text(PLAN)
    assert dpsynth(folder, "plan").returncode == 0
    return folder


@pytest.mark.parametrize(
    ("arguments", "code", "message", "hint"),
    [
        (["plan", "absent.yaml"], 2, "no such plan file", "dpsynth plan --init"),
        (["run", "absent.yaml"], 2, "no such plan file", "dpsynth plan --init"),
        (["status", "nowhere"], 6, "no plan.lock.json", "dpsynth plan"),
        (["check", "nowhere"], 6, "no plan.lock.json", "dpsynth plan"),
        (["pretrain", "nowhere"], 6, "no plan.lock.json", "dpsynth plan"),
        (["release-moments", "nowhere"], 6, "no plan.lock.json", "dpsynth plan"),
        (["train", "nowhere"], 6, "no plan.lock.json", "dpsynth plan"),
        (["sample", "nowhere"], 6, "no plan.lock.json", "dpsynth plan"),
        (["evaluate", "nowhere"], 6, "no plan.lock.json", "dpsynth plan"),
        (["close", "nowhere"], 6, "no plan.lock.json", "dpsynth plan"),
        (["replay", "nowhere"], 6, "nowhere", ""),
        (["frobnicate"], 2, "No such command", "dpsynth --help"),
        (["status", "--frobnicate"], 2, "No such option", "dpsynth status --help"),
        (["sample", "x", "-n", "0"], 2, "Invalid value", "dpsynth sample --help"),
        (["sample", "runs/tiny"], 6, "", "dpsynth pretrain runs/tiny"),  # RUN is named
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_with_json_a_failure_is_one_document_on_stdout(
    planned: Path, arguments: list[str], code: int, message: str, hint: str
) -> None:
    done = dpsynth(planned, *arguments, "--json")
    assert done.returncode == code, done.stderr
    found = json.loads(done.stdout)
    assert found.keys() == {"error"} and found["error"].keys() == {"message", "hint", "exit_code"}
    assert found["error"]["exit_code"] == code
    assert message in found["error"]["message"]
    assert hint in found["error"]["hint"]
    assert done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("line", "words", "hint"),
    [
        ("audit x --canaries abc", "'--canaries'", "'abc'"),
        ("audit x --canary-images faces", "'faces' is not one of 'patterns', 'public'", ""),
        ("evaluate x --probe foo", "'foo' is not one of 'lenet', 'wrn', 'both'", ""),
        ("sample x -n 0", "0", ""),
        ("audit --private", "requires an argument", ""),
    ],
)
def test_a_refused_option_says_what_was_given_and_what_to_type(
    planned: Path, line: str, words: str, hint: str
) -> None:
    done = dpsynth(planned, *line.split())
    assert done.returncode == 2 and done.stdout == ""
    told, tried = done.stderr.splitlines()
    assert told.startswith("error: ") and words in told and hint in told
    assert "Value error" not in told and "Input should be" not in told
    assert tried == f"try: dpsynth {line.split(maxsplit=1)[0]} --help"


def test_an_internal_error_is_json_too_and_holds_no_value(planned: Path) -> None:
    done = dpsynth(planned, "status", "--json", code=FAULT)
    assert json.loads(done.stdout)["error"]["exit_code"] == done.returncode == 1
    assert "a private value" not in done.stdout + done.stderr


def test_what_fails_after_its_result_prints_no_second_document(tmp_path: Path) -> None:
    """Replay of fixed noise prints its report, which says so itself, and exits 4."""
    (tmp_path / "plan.yaml").write_text(PLAN)
    assert dpsynth(tmp_path, "plan", "--unsafe-seed", "1").returncode == 0
    spend = """
from pathlib import Path
from dpsynth.artifacts.lock import read_lock
from dpsynth.artifacts.rooms import RunDir
from dpsynth.artifacts.spending import spending
run = RunDir(Path("runs/tiny")); lock = read_lock(run.lock)
with spending(run, lock, calibration_hash="c" * 64, noise_source=lock.noise_source) as spender:
    spender.charge(lock.slots[0]); spender.close()
"""
    done = dpsynth(tmp_path, "replay", "runs/tiny", "--json", code=spend)
    assert done.returncode == 4, done.stderr
    assert json.loads(done.stdout)["ok"] is False


def test_a_reader_that_went_away_is_no_traceback(planned: Path) -> None:
    program = "import sys; sys.argv[0] = 'dpsynth'\nfrom dpsynth.cli import main\nmain()"
    with subprocess.Popen(
        [sys.executable, "-c", program, "status", "nowhere", "--json"],
        cwd=planned, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        stderr = process.stderr.read()
    assert process.returncode == 6
    assert "BrokenPipe" not in stderr and "Traceback" not in stderr


SLOW = FAULT.replace(
    'raise RuntimeError("a private value")',
    "print('up', flush=True, file=sys.stderr); import time; time.sleep(60)",
)
SLOW += """
import dpsynth.planning.verify
dpsynth.planning.verify.load_verified = lambda *_: status(None)
"""


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize(
    ("command", "spent"),
    [("audit", "an audit spends no budget, and keeps"), ("train", ""), ("status", "spends no")],
)
def test_a_stopped_command_says_so_and_how_to_resume(
    planned: Path, sent: signal.Signals, code: int, command: str, spent: str
) -> None:
    program = f"import sys; sys.argv[0] = 'dpsynth'\n{SLOW}\nfrom dpsynth.cli import main\nmain()"
    with subprocess.Popen(
        [sys.executable, "-c", program, command, "runs/tiny", "--json"],
        cwd=planned, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={key: value for key, value in os.environ.items() if key != "WORLD_SIZE"},
    ) as process:  # fmt: skip
        assert process.stderr is not None
        assert process.stderr.readline() == "up\n"
        process.send_signal(sent)
        stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == code
    words = "stopped by SIGTERM" if sent == signal.SIGTERM else "interrupted"
    assert words in stderr and "Traceback" not in stderr
    assert f"dpsynth {command} runs/tiny --json" in stderr
    assert json.loads(stdout)["error"]["exit_code"] == code
    if sent == signal.SIGTERM:
        assert stderr.count("\n") == 1
    at_risk = ("charges so far stay spent", "what was cut off after its charge is spent")
    assert (any(words in stderr for words in at_risk)) is (not spent)
    assert spent in stderr
