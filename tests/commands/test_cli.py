"""The command line as typed: exit codes, streams, defaults. Each call is a process of its own."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from clikit import dpsynth

PLAN = """\
version: 1
name: tiny
budget: {epsilon: 2.0, delta: 1e-5}
private:
  source: {kind: npz, path: secret-records.npz}
  capacity: 1000
  image: {height: 8, width: 8}
  classes: [a, b]
  held_out: {by: hash, fraction: 0.2}
public:
  - {kind: letters, count: 200}
representation: {kind: pca, code: 4}
stages:
  moments: {covariance: class}
sampling: {method: release, count: 20}
"""


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a plan.yaml that is planned into its default run folder."""
    folder = tmp_path_factory.mktemp("planned")
    (folder / "plan.yaml").write_text(PLAN)
    done = dpsynth(folder, "plan", fresh=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_plan_prints_the_table_and_what_comes_next(planned: Path) -> None:
    done = dpsynth(planned, "plan")
    assert done.returncode == 0
    assert "moments" in done.stdout
    assert "composed" in done.stdout
    assert "runs/tiny/plan.lock.json" in done.stdout
    assert "next: dpsynth check runs/tiny" in done.stderr
    assert (planned / "runs" / "tiny" / "plan.lock.json").is_file()


def test_json_is_all_of_stdout(planned: Path) -> None:
    done = dpsynth(planned, "plan", "--json")
    found = json.loads(done.stdout)
    assert found["epsilon"] <= found["budget"]["epsilon"] == 2.0
    assert found["mechanisms"]["moments"]["executions"] == 1
    status = json.loads(dpsynth(planned, "status", "--json").stdout)
    assert status["next"] == "dpsynth check runs/tiny"
    assert status["epsilon_spent"] == 0.0


def test_run_defaults_to_the_plan_here_and_takes_a_plan_file(planned: Path) -> None:
    default = dpsynth(planned, "status").stdout
    assert default == dpsynth(planned, "status", "runs/tiny").stdout
    assert default == dpsynth(planned, "status", "plan.yaml").stdout
    # Typed without arguments: it finds the run, and then no records where the plan says.
    release = dpsynth(planned, "release-moments")
    assert release.returncode == 5
    assert "dpsynth check runs/tiny" in release.stderr
    assert "secret" not in release.stderr
    assert release.stdout == ""


def test_run_option_names_the_folder(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(PLAN)
    assert dpsynth(tmp_path, "plan", "p.yaml", "--run", "here/now").returncode == 0
    assert dpsynth(tmp_path, "status", "here/now").returncode == 0
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["plan"], 2, "dpsynth plan --init"),
        (["plan", "absent.yaml"], 2, "no such plan file"),
        (["status"], 2, "dpsynth plan --init"),
        (["status", "nowhere"], 6, "dpsynth plan"),
        (["train", "nowhere"], 6, "dpsynth plan"),
        (["frobnicate"], 2, "No such command"),
        (["plan", "--frobnicate"], 2, "No such option"),
        (["sample", "x", "-n", "0"], 2, "Invalid value"),
        (["replay", "nowhere"], 6, "nowhere"),
        (["--version"], 0, ""),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_exit_codes(tmp_path: Path, arguments: list[str], code: int, words: str) -> None:
    done = dpsynth(tmp_path, *arguments)
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    if code:
        assert done.stdout == ""


def test_a_bad_plan_is_one_error_and_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(PLAN.replace("epsilon: 2.0", "epsilon: 0"))
    done = dpsynth(tmp_path, "plan")
    assert done.returncode == 2
    assert done.stderr.startswith("error: plan.yaml:3: `budget.epsilon`: got 0")
    assert "try: write `epsilon: 1.0`" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_plan_changed_after_planning(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(PLAN)
    assert dpsynth(tmp_path, "plan").returncode == 0
    (tmp_path / "plan.yaml").write_text(PLAN.replace("2.0", "1.0"))
    done = dpsynth(tmp_path, "check")
    assert done.returncode == 2
    assert "dpsynth plan" in done.stderr


def test_over_budget_opens_no_private_file(tmp_path: Path) -> None:
    """A lock whose noise was halved, with a hash that fits, is exit 3 before any data."""
    (tmp_path / "plan.yaml").write_text(PLAN)
    assert dpsynth(tmp_path, "plan").returncode == 0
    forge = """
import dataclasses
from pathlib import Path
from dpsynth.artifacts.lock import read_lock, write_lock
path = Path("runs/tiny/plan.lock.json")
lock = read_lock(path)
rows = {"moments": lock.by_stage["moments"] | {"noise_multiplier": 0.5}}
slot = dataclasses.replace(lock.slots[0], noise_std=0.5)
write_lock(path, dataclasses.replace(lock, lock_hash="", slots=(slot,), by_stage=rows))
"""
    watch = """
import sys
sys.addaudithook(lambda name, args: print("OPENED", file=sys.stderr)
                 if name == "open" and "secret-records" in str(args[0]) else None)
"""
    done = dpsynth(tmp_path, "release-moments", code=forge + watch)
    assert done.returncode == 3, done.stderr
    assert "OPENED" not in done.stderr


def test_init_writes_a_plan_once(tmp_path: Path) -> None:
    assert dpsynth(tmp_path, "plan", "--init").returncode == 0
    assert dpsynth(tmp_path, "plan").returncode == 0
    again = dpsynth(tmp_path, "plan", "--init")
    assert again.returncode == 2
    assert "exists already" in again.stderr


def test_a_warning_goes_to_stderr(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(PLAN.replace("1e-5", "1e-3"))
    done = dpsynth(tmp_path, "plan", "--json")
    assert "1/(10 N)" in done.stderr
    json.loads(done.stdout)


def test_a_missing_extra_says_what_to_install(planned: Path) -> None:
    absent = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
sys.meta_path.insert(0, Absent())
"""
    done = dpsynth(planned, "pretrain", code=absent, fresh=True)
    assert done.returncode == 6
    assert "pip install -e '.[torch]'" in done.stderr


FAULT = """
import dpsynth.planning.steps
def status(run):
    secret = "a private value"
    raise RuntimeError("a private value")
dpsynth.planning.steps.status = status
"""


def test_an_internal_error_is_one_line_without_values(planned: Path) -> None:
    done = dpsynth(planned, "status", code=FAULT)
    assert done.returncode == 1
    assert "please report" in done.stderr
    assert "Traceback" not in done.stderr
    assert "a private value" not in done.stderr
    debug = dpsynth(planned, "status", code=FAULT, DPSYNTH_DEBUG="1")
    assert "Traceback" in debug.stderr
    assert "secret =" not in debug.stderr.replace('secret = "a private value"', "")


def test_a_full_disk_is_no_fault_of_dpsynth_and_names_no_file(planned: Path) -> None:
    full = FAULT.replace(
        'raise RuntimeError("a private value")', "raise OSError(28, 'No space', '/private/x.png')"
    )
    done = dpsynth(planned, "status", code=full)
    assert done.returncode == 2
    assert "the file system refused: No space\ntry: free some space" in done.stderr
    assert "x.png" not in done.stderr
    assert "internal error" not in done.stderr


def test_hints_are_quoted_for_the_shell(planned: Path) -> None:
    done = dpsynth(planned, "plan", "--run", "runs/a b")
    assert "dpsynth check 'runs/a b'" in done.stderr
    assert "dpsynth run plan.yaml --run 'runs/a b'" in done.stderr


def test_more_samples_than_file_names_have_digits_are_refused(planned: Path) -> None:
    done = dpsynth(planned, "sample", "-n", "10000001")
    assert done.returncode == 2
    assert "10000000" in done.stderr


def test_an_interrupt_says_how_to_resume(planned: Path) -> None:
    slow = FAULT.replace('raise RuntimeError("a private value")', "print('up', flush=True); "
                         "import time; time.sleep(60)")  # fmt: skip
    program = f"import sys; sys.argv[0] = 'dpsynth'\n{slow}\nfrom dpsynth.cli import main\nmain()"
    with subprocess.Popen(
        [sys.executable, "-c", program, "status", "runs/tiny"],
        cwd=planned, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "resume with: dpsynth status runs/tiny" in stderr
    assert "Traceback" not in stderr


def test_a_closed_pipe_is_quiet(planned: Path) -> None:
    program = "import sys; sys.argv[0] = 'dpsynth'\nfrom dpsynth.cli import main\nmain()"
    with subprocess.Popen(
        [sys.executable, "-c", program, "plan", "--json"],
        cwd=planned, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        stderr = process.stderr.read()
    assert "Traceback" not in stderr
    assert "BrokenPipe" not in stderr


def test_private_paths_stay_off_the_terminal_and_out_of_the_lock(planned: Path) -> None:
    for arguments in (["plan"], ["status"], ["status", "--json"]):
        done = dpsynth(planned, *arguments)
        assert "secret-records" not in done.stdout + done.stderr
    assert "secret" not in (planned / "runs/tiny/plan.lock.json").read_text()


def test_hints_name_the_run_as_typed(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(PLAN)
    assert dpsynth(tmp_path, "plan", "--run", "my run").returncode == 0
    done = dpsynth(tmp_path, "sample", "my run")
    assert done.returncode == 6
    assert "try: dpsynth pretrain 'my run'" in done.stderr
    assert "RUN" not in done.stderr
