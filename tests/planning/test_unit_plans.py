"""The unit of privacy in plans, locks, transcripts and cards."""

import pytest
from plan_texts import SMALL, celled, changed
from spendkit import make_lock, make_run, reseal, spend_all

from dpsynth.artifacts.transcript import Transcript, read_transcript
from dpsynth.errors import PlanError, ReplayError
from dpsynth.planning.replay import replay
from dpsynth.planning.table import as_json, render
from dpsynth.planning.units import read_unit, unit_words
from dpsynth.planning.verify import load_verified, verify
from dpsynth.planning.verify import make_run as plan_run
from dpsynth.planning.workload import follows
from dpsynth.planning.yaml_plan import load_plan, plan_hash
from dpsynth.released.card import build_card

UNIT = {"column": "patient", "most": 8}
LINE = "  unit: {column: patient, most: 8}\n"
NAMED = changed("  delta: 1e-5\n", "  delta: 1e-5\n" + LINE)


def loaded(folder, text):
    (folder / "plan.yaml").write_text(text)
    return load_plan(folder / "plan.yaml")


def test_a_plan_of_records_keeps_its_hash(tmp_path):
    """As versions before units of several images computed it."""
    expected = "038ac8689fb92e0eec7da31d31f9d5fdd3bb8e553e2e0314e530f88d4ee1e9ce"
    assert plan_hash(loaded(tmp_path, SMALL)) == expected
    spelt = changed("  delta: 1e-5\n", "  delta: 1e-5\n  unit: record\n")
    assert plan_hash(loaded(tmp_path, spelt)) == expected


def test_the_unit_is_in_the_hash_the_lock_and_the_table(tmp_path):
    plan = loaded(tmp_path, NAMED)
    assert plan.budget.column is not None
    hashes = {
        plan_hash(loaded(tmp_path, text))
        for text in (SMALL, NAMED, NAMED.replace("most: 8", "most: 7"), NAMED.replace("nt,", "n,"))
    }
    assert len(hashes) == 4
    lock = verify(plan)
    assert lock.budget["unit"] == lock.facts["budget"]["unit"] == UNIT
    assert follows(lock, plan)
    assert as_json(lock)["budget"]["unit"] == UNIT
    text = str(render(lock, "here").renderables[-1])
    assert "unit: patient (column patient), up to 8 images" in text


def test_the_unit_changes_neither_noise_nor_slots(tmp_path):
    """The bound of a whole unit is that of one record: what changes is what it protects."""
    with_unit, without = (verify(loaded(tmp_path, text)) for text in (NAMED, SMALL))
    assert with_unit.slots == without.slots
    assert with_unit.epsilon == without.epsilon


def test_a_lock_of_another_unit_does_not_follow(tmp_path):
    lock = verify(loaded(tmp_path, NAMED))
    other = loaded(tmp_path, NAMED.replace("most: 8", "most: 9"))
    assert not follows(lock, other)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("  unit: patient\n", "`unit: {column: patient, most: 8}`"),
        ("  unit: {column: patient}\n", "lacks the key `most`"),
        ("  unit: {most: 8}\n", "lacks the key `column`"),
        ("  unit: {column: patient, mots: 8}\n", "did you mean `most:`"),
        ("  unit: {column: patient, most: 0}\n", "at least 1"),
        ("  unit: {column: patient, most: 1025}\n", "at most 1024"),
        ("  unit: {column: 3, most: 8}\n", "expected text"),
        ("  unit: {column: ' x', most: 8}\n", "without outer spaces"),
        ("  unit: [patient]\n", "got a list"),
    ],
)
def test_a_unit_that_makes_no_sense_is_refused(line, words, tmp_path):
    with pytest.raises(PlanError) as caught:
        loaded(tmp_path, NAMED.replace(LINE, line))
    assert words in caught.value.message + caught.value.hint
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("{kind: npz, path: secret-records.npz}", "{kind: digits}", "kind digits has none"),
        (
            "{kind: npz, path: secret-records.npz}",
            "{kind: idx, images: a, labels: b}",
            "kind idx has none",
        ),
        (
            "{covariance: class}",
            "{covariance: shared, sensitivity: paper}",
            "sensitivity: paper bounds one record alone",
        ),
    ],
)
def test_plans_that_cannot_protect_whole_units_are_refused(old, new, words, tmp_path):
    with pytest.raises(PlanError, match=words) as caught:
        loaded(tmp_path, changed(old, new, NAMED))
    assert caught.value.exit_code == 2
    loaded(tmp_path, changed(old, new))  # of records they are fine


@pytest.mark.parametrize(
    "text", [NAMED, changed("  delta: 1e-5\n", "  delta: 1e-5\n" + LINE, celled())]
)
def test_plans_of_units_verify_and_load(text, tmp_path):
    (tmp_path / "plan.yaml").write_text(text)
    plan_run(tmp_path / "plan.yaml", tmp_path / "run")
    assert load_verified(tmp_path / "run").plan.budget.column is not None


@pytest.mark.parametrize(
    "value", ["user", {"column": "a"}, {"column": "a", "most": "8"}, {"column": "a", "most": 0},
              {"column": "a", "most": 1, "x": 1}, None, 3, {}, {"column": "`", "most": 2}],
)  # fmt: skip
def test_no_other_unit_is_read(value):
    with pytest.raises(ValueError, match="no unit of privacy"):
        read_unit(value)


def transcript_of(folder, **budget):
    lock = make_lock(budget=budget)
    return spend_all(make_run(folder / "runs" / "a", lock), lock)


def test_a_run_of_units_replays(tmp_path):
    run = transcript_of(tmp_path, unit=UNIT)
    found = replay(run.root)
    assert found.runs[0].budget["unit"] == UNIT
    assert found.ok


@pytest.mark.parametrize("unit", ["user", {"column": "patient", "most": 0}, {"column": "patient"}])
def test_a_forged_unit_does_not_replay(unit, tmp_path):
    run = transcript_of(tmp_path, unit=UNIT)
    lines = [dict(line) for line in read_transcript(run.transcript).lines]
    lines[0]["budget"] = {**lines[0]["budget"], "unit": unit}
    (tmp_path / "t.jsonl").write_bytes(reseal(lines))
    with pytest.raises(ReplayError):
        replay(tmp_path / "t.jsonl")


@pytest.mark.parametrize(
    "statistic",
    [
        {"kind": "paper-class-sums", "classes": 10, "dim": 8},
        {"kind": "paper-second-moment", "capacity": 1000, "dim": 8},
        {"kind": "paper-cross-moments", "capacity": 1000, "features": 3, "dim": 8},
    ],
)
def test_charges_that_bound_one_record_do_not_replay_for_units(statistic, tmp_path):
    run = transcript_of(tmp_path, unit=UNIT)
    lines = [dict(line) for line in read_transcript(run.transcript).lines]
    (charge,) = (line for line in lines if line["kind"] == "charge" and line["slot"] == 1)
    charge["statistic"] = statistic
    charge["noise_std"] = 50.0
    (tmp_path / "t.jsonl").write_bytes(reseal(lines))
    with pytest.raises(ReplayError, match="bounds one record"):
        replay(tmp_path / "t.jsonl")


def test_sums_over_runs_of_several_units_say_so(tmp_path):
    first = transcript_of(tmp_path / "one", unit=UNIT)
    second = transcript_of(tmp_path / "two")
    (note,) = replay(first.root, second.root).notes
    assert "different units" in note
    again = transcript_of(tmp_path / "three")
    assert replay(second.root, again.root).notes == ()


def test_the_card_says_what_is_protected(tmp_path):
    lock = verify(loaded(tmp_path, NAMED))
    card = build_card(lock, Transcript((), 0), {})
    assert "- Adjacency: add-or-remove-one patient." in card
    assert "- Unit of privacy: one patient (column patient), up to 8 images." in card
    assert "all images of one patient together" in card
    assert "- Declared number of units: 1,000." in card
    assert "weaker guarantee" not in card
    plain = build_card(verify(loaded(tmp_path, SMALL)), Transcript((), 0), {})
    assert "- Adjacency: add-or-remove-one record." in plain
    assert "- Unit of privacy: one record, that is one labelled image." in plain
    assert "- Declared number of records: 1,000." in plain


def test_words_for_one_image():
    assert unit_words({"column": "author", "most": 1}) == "author (column author), up to 1 image"
