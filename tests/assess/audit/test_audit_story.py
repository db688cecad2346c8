"""Whole audits of small plans: faults seen, the run untouched, worlds deleted, work resumed."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from auditkit import CAPTIONS, CELLS, FLOW, RELEASE, SHARED, TRAIN, planned, shared_run
from clikit import typed
from sklearn.datasets import load_digits
from token_runs import token_plan

from dpsynth.assess.audit import building
from dpsynth.assess.audit import records as records_module
from dpsynth.assess.audit import run as run_module
from dpsynth.assess.audit.building import Builder, specs, world_of
from dpsynth.assess.audit.canaries import draw_canaries
from dpsynth.assess.audit.journal import WORLDS, read_transcript
from dpsynth.assess.audit.measuring import attack_world
from dpsynth.assess.audit.records import private_records
from dpsynth.assess.audit.run import Asked, audit
from dpsynth.assess.audit.store import as_reference
from dpsynth.assess.audit.worlds import CONTROLS
from dpsynth.cli import main
from dpsynth.commands.audit import _as_text
from dpsynth.console import mute, render
from dpsynth.errors import PlanError, UsageError
from dpsynth.planning.captions import FreeCaptions
from dpsynth.planning.yaml_plan import load_plan
from dpsynth.private.dpsgd import train
from dpsynth.private.moments import release_moments
from dpsynth.public.representation import load_representation
from dpsynth.released.distill import distill
from dpsynth.released.sampling import sample

QUICK = Asked(quick=True, canaries=50)


def _files(verified):
    """Hashes of every file of the run and its ledger, but for the audit's own."""
    root = verified.run.root.parent
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file() and "audit" not in path.relative_to(root).parts[2:3]
    }


@pytest.fixture(scope="module")
def flow(tmp_path_factory):
    """A plan with every stage, audited, and its files before and after."""
    verified = planned(tmp_path_factory.mktemp("flow"), f"{SHARED}\n{TRAIN}", FLOW)
    before = _files(verified)
    with mute():
        report = audit(verified, QUICK)
    return verified, report, before, _files(verified)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A plan of moments alone."""
    return planned(tmp_path_factory.mktemp("plain"), SHARED, RELEASE)


def test_the_plan_passes_and_every_fault_is_seen_in_every_stage(flow):
    _, report, _, _ = flow
    assert report["passed"] and report["verdict"]["controls_seen"] == dict.fromkeys(CONTROLS, True)
    worlds = {(row["world"], row["control"]) for row in report["attacks"]}
    faults = {name for name, control in worlds if control}
    assert faults == {
        *(f"{c}-{s}" for c in CONTROLS[:3] for s in ("moments", "gradients")),
        "copied-record",
    }
    for world in faults:
        bounds = [row["bound"] for row in report["attacks"] if row["world"] == world]
        assert max(bounds) > 1, world
    own = [row for row in report["attacks"] if row["control"] is None]
    assert max(row["bound"] for row in own) <= report["promised"]["epsilon"] <= 3
    assert {row["promised"] for row in own} == {report["promised"]["epsilon"]}
    noise = [row["noise_variance"] for row in own if row["attack"] == "gradients"]
    assert noise == pytest.approx([1.0], abs=0.3)
    attacks = {row["attack"] for row in own}
    assert attacks >= {"moments", "gradients", "velocity-residual", "nearest-sample"}


def test_the_run_its_transcript_and_its_ledger_are_untouched(flow):
    verified, _, before, after = flow
    assert before == after
    assert not verified.run.transcript.exists()
    assert not (verified.run.root.parent / "ledgers").exists()


def test_models_without_noise_are_gone_and_the_rest_is_private(flow):
    verified, *_ = flow
    folder = verified.run.curator / "audit"
    assert list((folder / WORLDS).iterdir()) == []
    assert {p.name for p in folder.iterdir()} == {
        "audit.json", "audit.png", "audit.lock.json", "audit-transcript.jsonl", ".audit.lock",
        WORLDS,
    }  # fmt: skip
    assert {p.stat().st_mode & 0o777 for p in folder.iterdir() if p.is_file()} == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700
    text = (folder / "audit.json").read_text()
    assert json.loads(text)["format"] == "dpsynth-audit-1"
    assert '"included"' not in text and str(verified.run.root) not in text


def test_its_transcript_charges_every_slot_of_every_world(flow):
    verified, *_ = flow
    lines = read_transcript(verified.run.curator / "audit")
    charged = [(line["world"], line["mechanism"]) for line in lines if line["kind"] == "charge"]
    train = [slot.name for slot in verified.lock.stage_slots("train")]
    assert [name for world, name in charged if world == "plan"] == ["moments", *train]
    assert [name for world, name in charged if world == "no-clip-moments"] == ["moments"]
    assert [name for world, name in charged if world == "no-noise-gradients"] == train
    assert len(set(charged)) == len(charged)
    settled = [line["world"] for line in lines if line["kind"] == "settle"]
    assert settled == sorted(settled, key=settled.index) and len(settled) == 9


def test_an_audit_that_was_cut_off_goes_on_with_the_next_world(plain, monkeypatch):
    verified = plain
    made, build = [], Builder.build

    def failing(self, spec, charge, advance):
        found = build(self, spec, charge, advance)
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(spec.name)
        return found

    monkeypatch.setattr(Builder, "build", failing)
    with mute(), pytest.raises(KeyboardInterrupt):
        audit(verified, QUICK)
    folder = verified.run.curator / "audit"
    assert {p.stem for p in (folder / WORLDS).glob("*.safetensors")} == set(made)
    assert {p.stat().st_mode & 0o777 for p in (folder / WORLDS).iterdir()} == {0o600}
    monkeypatch.setattr(Builder, "build", build)
    with mute():
        report = audit(verified, QUICK)
    lines = read_transcript(folder)
    attempts = [(line["world"], line["attempt"]) for line in lines if line["kind"] == "settle"]
    assert attempts == [
        ("plan", 1), ("no-noise-moments", 1), ("no-clip-moments", 2),
        ("noise-reused-moments", 1), ("copied-record", 1),
    ]  # fmt: skip
    assert report["passed"]


def test_a_control_that_is_not_seen_ends_with_seven(plain, monkeypatch, capsys):
    monkeypatch.setattr(building, "faulty_source", lambda control: None)  # no fault is planted
    line = ["dpsynth", "audit", str(plain.run.root), "--quick", "--canaries", "50", "--json"]
    monkeypatch.setattr("sys.argv", line)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 7
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert found["ok"] is found["passed"] is False
    seen = found["verdict"]["controls_seen"]
    assert seen == {**dict.fromkeys(CONTROLS, True), "no-noise": False, "noise-reused": False}
    assert "the audit failed" in said.err


def test_a_fault_of_the_plan_itself_is_above_the_promise(plain, monkeypatch):
    real = building.faulty_source
    monkeypatch.setattr(building, "faulty_source", lambda control: real(control or "no-noise"))
    with mute():
        report = audit(plain, Asked(quick=True, canaries=50))
    assert not report["passed"]
    assert ["plan", "moments"] in [one[:2] for one in report["verdict"]["leaked"]]


def test_reference_models_and_the_run_s_own_model_are_attacked_too(flow):
    verified, report, _, _ = flow
    with mute():
        release_moments(verified)
        distill(verified)
        train(verified)
        sample(verified)
    records = private_records(verified)
    space = load_representation(verified.run, verified.plan)
    own = run_module.own_run(verified.run, records, space)
    assert {row["attack"] for row in own} == {"velocity-residual", "nearest-sample"}
    for row in own:
        assert row["members"] > 1_000 and row["others"] > 300
        assert row["auc_interval"][0] <= 0.5 + report["promised"]["advantage"]
    canaries = draw_canaries(verified.plan, space, 60, "patterns", records.marks)
    builder, worlds = Builder(verified.run, records, canaries, 20), []
    for spec in specs(verified.plan, verified.lock, None, 3):
        if spec.control is None and spec.kind == "records":
            with mute():
                found = builder.build(spec, lambda slot: None, lambda: None)
            worlds.append(world_of(spec, *found, space.radius))
    first, *others = worlds
    assert not np.array_equal(first.canaries.included, others[0].canaries.included)
    world = replace(first, references=tuple(map(as_reference, others)))
    assert "likelihood-ratio" in {one.seen.attack for one in attack_world(world)}


def test_public_images_stand_in_for_the_private_records(plain, monkeypatch):
    monkeypatch.setattr(records_module, "open_private", None)  # no one may open them
    with mute():
        report = audit(plain, Asked(quick=True, canaries=50, public_data=True))
    assert report["passed"] and report["records"] == "public" and report["own_run"] == []
    assert "may be published" in report["verdict"]["text"]
    assert Path(report["where"]).parent == plain.run.curator / "audit-public-data"


def test_worlds_of_each_kind_of_plan():
    cells = shared_run(CELLS, RELEASE)
    names = [spec.name for spec in specs(cells.plan, cells.lock, None, 2)]
    assert names == [
        "plan", "reference-1", "reference-2", "no-noise-moments", "no-clip-moments",
        "noise-reused-moments", "copied-record",
    ]  # fmt: skip
    controls = [spec for spec in specs(cells.plan, cells.lock, None) if spec.control]
    assert all(spec.lock.epsilon <= 1 < cells.lock.epsilon for spec in controls)
    assert all(spec.plan.budget.epsilon == 1 for spec in controls)


def test_numbers_out_of_range_are_refused():
    run = shared_run(SHARED, RELEASE)
    with pytest.raises(UsageError, match="expected 0 to 256"):
        audit(run, Asked(references=257))
    for count in (3, 0, -1, 2001):
        with pytest.raises(UsageError, match=f"^{count} canaries.*expected 50 to 2000") as refused:
            audit(run, Asked(canaries=count))
        assert refused.value.hint == "--canaries 200"


def test_the_verdict_names_the_canaries_that_were_planted(flow):
    _, report, _, _ = flow
    planted = {row["canaries"] for row in report["attacks"]}
    assert planted == {50} == {report["asked"]["canaries"]}
    assert "with 50 canaries planted" in report["verdict"]["text"]


def test_reference_models_without_a_model_are_told_of(plain, capsys):
    asked = Asked(quick=True, canaries=50, references=4)
    assert run_module._references(plain.plan, asked) == 0
    assert "--references 4 is ignored: the plan trains no model" in capsys.readouterr().err
    assert run_module._references(plain.plan, replace(asked, references=None)) == 0
    assert run_module._references(plain.plan, replace(asked, references=0)) == 0
    assert capsys.readouterr().err == ""


def test_numbers_on_the_terminal_are_the_verdict_s(flow, capsys):
    _, report, _, _ = flow
    rows = [{**report["attacks"][0], "promised": 0.99998, "bound": 2.88415, "auc": 0.74312}]
    render(_as_text({"ok": True, **report, "attacks": rows, "own_run": []}))
    line = next(x for x in capsys.readouterr().out.splitlines() if "2.884" in x).split()
    assert line[2:5] == ["1", "2.884", "0.743"]


def test_a_warning_is_told_of_without_its_figures(plain, monkeypatch, capsys):
    told = {"passed": True, "findings": 5, "where": "runs/x/audit.json", "picture": "x.png"}
    told |= {"verdict": {"warned": [["plan", "moments"]], "text": "AUC 0.79"}}
    monkeypatch.setattr(run_module, "audit", lambda verified, asked: told)
    monkeypatch.setattr("dpsynth.commands._options.may_show", lambda verified, show: False)
    monkeypatch.setattr("sys.argv", ["dpsynth", "audit", str(plain.run.root)])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    assert ended.value.code == 0
    assert "1 warning in the verdict: read runs/x/audit.json" in said.err
    assert "0.79" not in said.out + said.err


def test_the_command_line(tmp_path):
    digits, source = load_digits(), tmp_path / "secret" / "records.npz"
    source.parent.mkdir()
    np.savez(source, images=(digits.images * 15).astype(np.uint8), labels=digits.target)
    planned(tmp_path, SHARED, RELEASE, source=f"{{kind: npz, path: {source}}}", public="false")
    told, both, wrong = typed(
        tmp_path,
        "audit runs/tiny --quick --canaries 50 --json",
        "audit runs/tiny --public-data --private x",
        "audit runs/tiny --canary-images faces",
    )
    assert (told.code, both.code, wrong.code) == (0, 2, 2)
    found = json.loads(told.out)
    assert set(found) == {"ok", "findings", "where"} and found["ok"]
    assert "training 1 of 5" in told.err and str(source.parent) not in told.err + told.out


def test_the_verdict_is_printed_where_it_may_be(flow, capsys):
    _, report, _, _ = flow
    shown = {"ok": True, **report}
    render(_as_text(shown))
    render(_as_text({key: shown[key] for key in ("ok", "findings", "where")}))
    said = " ".join(capsys.readouterr().out.split())
    assert "PASS" in said and "no-clip-moments" in said and "curator-only findings in" in said


def test_no_more_canaries_than_a_small_release_can_tell_apart(plain):
    cells = shared_run(CELLS, RELEASE)
    counts = [run_module.canaries_of(run.plan, Asked()) for run in (plain, cells)]
    assert counts == [50, 150]  # of 10 counts, 10 x 8 sums, and a triangle of 36 or ten
    assert run_module.canaries_of(plain.plan, Asked(canaries=150)) == 150


def test_a_release_by_captions_is_audited_too(tmp_path):
    verified = planned(tmp_path, CAPTIONS, RELEASE)
    with mute():
        report = audit(verified, Asked(quick=True))
    assert report["passed"]
    assert {row["attack"] for row in report["attacks"]} >= {"moments", "nearest-sample"}


def test_free_captions_are_refused_before_anything_is_read(monkeypatch):
    verified = shared_run(SHARED, RELEASE)
    private = verified.plan.private.model_copy(update={"captions": FreeCaptions(kind="free")})
    monkeypatch.setattr(records_module, "open_private", None)
    plan = verified.plan.model_copy(update={"private": private})
    with pytest.raises(PlanError, match="captions"):
        run_module.require_known(plan)


def test_training_on_tokens_is_refused_for_nothing_would_attack_it(tmp_path, monkeypatch):
    plan = load_plan(token_plan(tmp_path))
    monkeypatch.setattr(records_module, "open_private", None)
    with pytest.raises(PlanError, match="samples are not audited") as found:
        run_module.audit(SimpleNamespace(plan=plan, run=None))
    assert found.value.exit_code == 2
