"""What is compared, and what is refused before anything is run: from plan files alone."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dpsynth.artifacts.files import read_json
from dpsynth.artifacts.ledger import Entry, Ledger
from dpsynth.assess.comparison import making, sharing
from dpsynth.assess.comparison.derived import with_epsilon
from dpsynth.assess.comparison.entrants import Entrant, gathered, labels
from dpsynth.assess.comparison.equal import require_allowed, require_equal
from dpsynth.assess.comparison.figure import draw, paths_of
from dpsynth.assess.comparison.making import compare, default_folder
from dpsynth.assess.comparison.rows import bounds_of, notes_of, over, rows_of
from dpsynth.errors import BudgetError, MissingError, PlanError, UsageError
from dpsynth.planning.yaml_plan import load_plan

PLAN = """\
# A remark that a derived plan has no need of.
name: {name}
budget: {{epsilon: {epsilon}, delta: 1e-5}}
private:
  source: {{kind: idx, images: data/images, labels: data/labels}}
  public: {public}
{cap}  capacity: 1800
  image: {{height: 8, width: 8}}
  classes: [a, b]
  held_out: {{by: source, source: {{kind: npz, path: {held}}}}}
public:
  - {{kind: folder, path: ../public}}
representation: {{kind: pca, code: 4}}
stages:
  moments: {{covariance: {covariance}}}
sampling: {{method: release, count: 10}}
"""
CAP = "  cap: {{epsilon: {}, delta: 1e-3}}\n"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def plan(name: str, *, epsilon=1.0, public="false", cap=None, held="test.npz", covariance="class"):
    file = Path(f"{name}.yaml")
    said = "" if cap is None else CAP.format(cap)
    file.write_text(
        PLAN.format(
            name=name, epsilon=epsilon, public=public, cap=said, held=held, covariance=covariance
        )
    )
    return file


def entrants(*files: Path, epsilons=(), repeat=1) -> list[Entrant]:
    return gathered(files, epsilons=epsilons, repeat=repeat, folder=Path("out"), private=None)


def test_a_derived_plan_differs_in_name_and_epsilon_alone(tmp_path):
    file = plan("plain")
    made = with_epsilon(file, 0.25, Path("elsewhere/plans"))
    assert made is not None
    made.path.parent.mkdir(parents=True)
    made.path.write_text(made.text)
    before, after = load_plan(file), load_plan(made.path)
    assert after.name == "plain-eps-0.25"
    assert after.budget == before.budget.model_copy(update={"epsilon": 0.25})
    same = before.model_copy(update={"name": after.name, "budget": after.budget})
    assert after == same  # paths too: they are absolute in both
    assert after.public[0].path == tmp_path.parent / "public"


def test_a_plan_at_its_own_epsilon_is_taken_as_it_is():
    assert with_epsilon(plan("plain"), 1.0, Path("x")) is None
    found = entrants(plan("plain"), epsilons=(3.0, 1.0))
    assert [one.run.root for one in found] == [Path("runs/plain-eps-3"), Path("runs/plain")]


def test_runs_of_several_repeats_have_numbers():
    found = entrants(plan("plain"), epsilons=(0.5,), repeat=2)
    assert [one.name for one in found] == ["plain-eps-0.5-1", "plain-eps-0.5-2"]
    assert len({one.settings for one in found}) == 1


def test_two_plans_of_one_name_would_be_one_run():
    first = plan("plain")
    Path("sub").mkdir()
    second = Path("sub/plain.yaml")
    second.write_text(first.read_text())
    with pytest.raises(UsageError, match="one run"):
        entrants(first, second)


def test_a_method_is_one_path_over_epsilon():
    found = entrants(
        plan("a-eps-1"), plan("a-three", epsilon=3.0), plan("b-eps-1", covariance="shared"),
        plan("b-eps-3", epsilon=3.0, covariance="class"),
    )  # fmt: skip
    # a-three has the settings of a-eps-1; b-eps-3 too, and settings go before names.
    assert list(labels(found).values()) == ["a", "a", "b", "a"]


def test_names_join_plans_whose_settings_follow_epsilon():
    found = entrants(plan("b-eps-1", covariance="shared"), plan("b-eps-3", epsilon=3.0))
    assert list(labels(found).values()) == ["b", "b"]
    plain = entrants(plan("b", covariance="shared"), plan("c", epsilon=3.0))
    assert list(labels(plain).values()) == ["b", "c"]


def test_other_held_out_records_are_refused():
    with pytest.raises(UsageError, match="one and two differ in where the held-out records lie"):
        require_equal(entrants(plan("one"), plan("two", held="other.npz")))


def test_every_method_is_compared_at_every_epsilon():
    both = (plan("one"), plan("two", covariance="shared"))
    require_equal(entrants(*both, epsilons=(0.5, 2.0)))
    with pytest.raises(UsageError, match="one and three have different budgets"):
        require_equal(entrants(both[0], plan("three", epsilon=3.0, covariance="shared")))
    with pytest.raises(UsageError, match="different budgets: epsilon 1 against 1, 3"):
        require_equal(entrants(*both, plan("two-eps-3", epsilon=3.0, covariance="shared")))


def test_several_runs_of_one_plan_need_a_cap_or_public_data():
    with pytest.raises(BudgetError, match=r"3 runs of one\.yaml on private data spend epsilon 3"):
        require_allowed(entrants(plan("one"), repeat=3))
    require_allowed(entrants(plan("one", public="true"), repeat=3))
    require_allowed(entrants(plan("one", cap=3.0), repeat=3))
    require_allowed(entrants(plan("one"), plan("two", covariance="shared")))


def test_a_cap_counts_earlier_runs_and_all_fresh_ones():
    found = entrants(plan("one", cap=3.5), repeat=3)
    ledger = Ledger.beside(found[0].run.root, found[0].places[0])
    require_allowed(found)
    assert not ledger.folder.exists()
    ledger.enter(Entry("id", "earlier", "hash", epsilon=1.0, delta=1e-5), None)
    with pytest.raises(BudgetError, match=r"with one-3, .* epsilon 4 .* cap of 3\.5"):
        require_allowed(found)


def test_a_comparison_that_runs_nothing_needs_something_finished():
    with pytest.raises(MissingError, match="none of these runs is finished"):
        compare([plan("one")])
    assert not Path("runs").exists()
    with pytest.raises(PlanError, match="no such plan file"):
        compare([Path("nothing.yaml")])


def test_a_long_default_folder_is_cut_and_stays_distinct():
    first = [plan("a" * 40), plan("b" * 40)]
    other = [plan("a" * 40), plan("c" * 40)]
    made, different = default_folder(first), default_folder(other)
    assert made != different
    assert len(made.name) < 80
    assert made == default_folder(first)


def result(method="m", epsilon=1.0, accuracy=0.5, run="r", **more):
    values = {
        "accuracy": {"synthetic": accuracy, "ceiling": 0.9, "floor": 0.1},
        "frechet": {"synthetic": 100 * accuracy, "interval": [1, 2], "floor": 400.0},
    }
    return {
        "run": run, "method": method, "kind": None, "epsilon": epsilon, "delta": 1e-5, "spent": 1.0,
        "by_stage": {}, "samples": 10, "seconds": None, "unsafe": False, "protocol": {},
        "measures": values, **more,
    }  # fmt: skip


def test_rows_have_mean_and_spread():
    values = [0.5, 0.75, 0.6]
    runs = [result(accuracy=value, run=f"r{value}", seconds=value) for value in values]
    (row,) = rows_of(runs)
    measured = row["measures"]["accuracy"]
    assert measured["mean"] == pytest.approx(np.mean(values))
    assert measured["sd"] == pytest.approx(np.std(values, ddof=1))
    assert "interval" not in row["measures"]["frechet"]
    assert row["seconds"]["mean"] == pytest.approx(np.mean(values))
    (alone,) = rows_of(runs[:1])
    assert alone["measures"]["frechet"]["interval"] == [1, 2]
    assert alone["measures"]["accuracy"]["sd"] is None


def test_rows_keep_methods_together_and_epsilons_rising():
    runs = [result("b", 3.0), result("a", 1.0), result("b", 1.0), result("a", 3.0)]
    found = [(row["method"], row["epsilon"]) for row in rows_of(runs)]
    assert found == [("b", 1.0), ("b", 3.0), ("a", 1.0), ("a", 3.0)]
    points = paths_of(rows_of(runs))
    assert [point["epsilon"] for point in points["a"]] == [1.0, 3.0]


def test_notes_tell_what_makes_rows_unlike():
    told = " ".join(notes_of([result(samples=10), result(samples=20, unsafe=True, run="bad")]))
    assert "10, 20" in told
    assert "UNSAFE: the noise of bad" in told
    told = " ".join(notes_of([result(), result(protocol={"probe": "other"})]))
    assert "protocol (probe)" in told
    assert notes_of([result(), result()]) == []


def test_the_figure_needs_both_measures_and_takes_any_name():
    runs = [result("$x_{1}$ & <b>", 1.0), result("_hidden", 1.0, 0.3)]
    png = draw(rows_of(runs), bounds_of(runs), "title", "curator-only")
    assert png is not None
    assert png.startswith(b"\x89PNG")
    assert b"curator-only" in png
    bare = result(measures={"accuracy": {"synthetic": 0.5}})
    assert draw(rows_of([bare]), bounds_of([bare]), "title", "x") is None


def test_public_files_are_shared_as_far_as_plans_agree():
    one, two, three = entrants(plan("one"), plan("two", covariance="shared"), plan("three"))
    for name in ("geometry.safetensors", "prior.safetensors", "within.safetensors"):
        one.run.public.mkdir(parents=True, exist_ok=True)
        (one.run.public / name).write_text(name)
    (one.run.public / "calibration.json").write_text("{}")
    (one.run.curator / "cache").mkdir(parents=True)
    (one.run.curator / "cache" / "kept.json").write_text("{}")
    assert sharing.share(two, [one, three]) == "one"
    assert sharing.share(three, [one, two]) == "one"
    shared = {path.name for path in two.run.public.iterdir()}
    assert shared == {"geometry.safetensors", "prior.safetensors"}  # what both surely use
    assert len(list(three.run.public.iterdir())) == 4
    assert (three.run.curator / "cache" / "kept.json").is_file()
    assert sharing.share(three, [one, two]) is None  # it has its own by now


def test_seconds_of_a_run_that_is_cut_off_add_up(monkeypatch):
    (one,) = entrants(plan("one", public="true"))
    clock = iter([0.0, 5.0, 100.0, 102.0])
    monkeypatch.setattr(making.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(making, "status", lambda run: SimpleNamespace(steps=()))
    times = Path("times.json")
    with pytest.raises(KeyboardInterrupt), making._timed(times, one) as told:
        told["public_files_of"] = "other"
        raise KeyboardInterrupt
    with making._timed(times, one):
        pass
    assert read_json(times) == {"one": {"public_files_of": "other", "seconds": 7.0}}


def test_mean_of_one_value_has_no_spread():
    assert over([2]) == {"mean": 2.0, "sd": None, "values": [2.0]}
