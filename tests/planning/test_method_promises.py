"""What a line `method:` may never drop; locks of its stages that do not follow from the plan."""

import dataclasses

import pytest
from plan_texts import SMALL, changed

from dpsynth.accounting.queries import CentralSums, EmbeddingSums, VoteHistogram
from dpsynth.artifacts.lock import plan_hash
from dpsynth.errors import PlanError
from dpsynth.planning.methods import METHODS
from dpsynth.planning.schema import Plan
from dpsynth.planning.verify import verify
from dpsynth.planning.workload import active_weights, delta_slack, follows, slots
from dpsynth.planning.yaml_plan import parse_plan

PLAN = """\
version: 1
name: promised
budget: {epsilon: 2.0, delta: 1e-5, unit: {column: patient, most: 4}}
private:
  source: {kind: npz, path: secret-records.npz}
  capacity: 1000
  image: {height: 8, width: 8}
  classes: [a, b]
  cap: {epsilon: 5.0, delta: 1e-4}
  held_out: {by: hash, fraction: 0.2}
public:
  - {kind: letters, count: 200}
representation: {kind: pca, code: 4}
split: epsilon
stages:
  moments: {weight: 0.3}
  train: {weight: 0.5, rate: 0.05, steps: 30, chunk: 20, clip: 0.5, allocation: {}}
  evaluation: {weight: 0.2, spares: 1}
distillation: {steps: 10}
evaluation: {probe_epochs: 3}
embedding: {features: 20, pairs: 10, width: 5, spares: 1}
evolution: {rounds: 3, population: 5, spares: 1}
central: {images: 4, rate: 0.1, spares: 1}
sampling: {method: flow, count: 20}
"""
KEPT = ("budget", "private", "public", "split", "evaluation", "public_seed")


@pytest.mark.parametrize("method", METHODS)
def test_budget_unit_cap_and_evaluation_are_under_every_method(method):
    plain = changed("\nsplit: epsilon", "\nsplit: epsilon\nmethod: straightdp", PLAN)
    straight = parse_plan(plain).facts()
    plan = parse_plan(PLAN + f"method: {method}\n")
    facts = plan.facts()
    assert {key: facts[key] for key in KEPT} == {key: straight[key] for key in KEPT}
    assert facts["stages"]["evaluation"] == straight["stages"]["evaluation"]
    assert facts["private"]["cap"] == {"epsilon": 5.0, "delta": 1e-4}
    assert "evaluation" in active_weights(plan)
    planned = slots(plan, dict.fromkeys(active_weights(plan), 3.0))
    assert [slot.stage for slot in planned[-2:]] == ["evaluation", "evaluation"]
    drawn = sum(slot.stage != "train" for slot in planned)
    assert delta_slack(plan) > 0
    assert drawn >= 2
    assert Plan.of_facts(facts).facts() == facts, "a lock's plan is the plan"


def test_captions_are_not_dropped_in_silence():
    text = changed(
        "  capacity: 1000",
        "  captions: {kind: template, template: '{class}'}\n  capacity: 1000",
        SMALL,
    )
    for method in ("merf", "evolution", "central-images"):
        given = changed("moments: {covariance: class}", "train: {rate: 0.05, steps: 4}", text)
        with pytest.raises(PlanError, match="records have captions"):
            parse_plan(given.replace("method: release", "method: flow") + f"method: {method}\n")


def lock_of(method, **sections):
    text = changed("method: release, ", "", SMALL)
    return verify(parse_plan(f"{text}method: {method}\n" + "".join(sections.values())))


def forged(lock, **changes):
    """The lock with its first slot changed; hashes are right."""
    slot = dataclasses.replace(lock.slots[0], **changes)
    return dataclasses.replace(lock, slots=(slot, *lock.slots[1:]), lock_hash="")


def test_an_embedding_of_other_weights_or_size_does_not_follow():
    lock = lock_of("merf", own="embedding: {features: 20}\n")
    plan, slot = Plan.of_facts(lock.facts), lock.slots[0]
    assert follows(lock, plan)
    statistics = [
        dataclasses.replace(slot.statistic, **change)
        for change in ({"count": 0.05}, {"sum": 0.9}, {"classes": 1}, {"dim": 40})
    ]
    assert all(isinstance(statistic, EmbeddingSums) for statistic in statistics)
    for statistic in (*statistics, VoteHistogram(2), CentralSums(2, 20)):
        assert not follows(forged(lock, statistic=statistic), plan), statistic
    assert not follows(forged(lock, rate=0.1, steps=1), plan)
    assert not follows(forged(lock, noise_std=slot.noise_std / 2), plan)


def test_votes_of_other_bins_or_rounds_do_not_follow():
    lock = lock_of("evolution", own="evolution: {rounds: 2, population: 5}\n")
    plan = Plan.of_facts(lock.facts)
    assert follows(lock, plan)
    for change in (
        {"statistic": VoteHistogram(5)},
        {"rate": 0.1, "steps": 1},
        {"noise_std": lock.slots[0].noise_std / 2},
        {"spare": True},
        {"name": "votes-02"},
    ):
        assert not follows(forged(lock, **change), plan), change
    fewer = dataclasses.replace(lock, slots=lock.slots[:1], lock_hash="")
    assert not follows(fewer, plan)


def test_a_lock_that_names_another_method_does_not_follow():
    lock = lock_of("merf", own="embedding: {features: 20}\n")
    for method in ("ntk", "evolution", "straightdp", "dp-sgd"):
        facts = {**lock.facts, "method": method}
        one = dataclasses.replace(lock, facts=facts, plan_hash=plan_hash(facts), lock_hash="")
        try:
            plan = Plan.of_facts(facts)
        except ValueError:
            continue
        assert not follows(one, plan), method
