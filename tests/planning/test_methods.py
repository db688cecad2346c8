"""`method:`: one line of a plan changes the method; what each spends, and what is refused."""

import dataclasses
import math
import shutil
from pathlib import Path
from typing import Any

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant, privacy_loss_distribution
from plan_texts import SMALL, TOKENS, TRAINED, celled, changed
from spendkit import reseal

from dpsynth.accounting import discrete, gaussian
from dpsynth.accounting.queries import CentralSums, EmbeddingSums, VoteHistogram
from dpsynth.artifacts.lock import read_lock
from dpsynth.artifacts.rooms import RunDir
from dpsynth.artifacts.spending import Spender, spending
from dpsynth.artifacts.transcript import read_transcript
from dpsynth.errors import BudgetError, PlanError, ReplayError
from dpsynth.planning import table
from dpsynth.planning.methods import METHODS
from dpsynth.planning.replay import replay
from dpsynth.planning.schema import Plan
from dpsynth.planning.steps import status
from dpsynth.planning.verify import make_run, verify
from dpsynth.planning.workload import follows
from dpsynth.planning.yaml_plan import load_plan, parse_plan, plan_hash

PLANS = Path(__file__).parents[2] / "plans"
SETTINGS = """\
embedding: {features: 20, pairs: 10, width: 5}
evolution: {rounds: 3, population: 5}
central: {images: 4, rate: 0.1}
"""
BASE = (
    changed("clip: 0.5}", "clip: 0.5, allocation: {}}", TRAINED).replace(
        "method: release", "method: flow"
    )
    + SETTINGS
)
"""Everything of every method; a line `method: ...` more makes it a plan."""
STAGES = {
    "straightdp": {"moments", "train"},
    "dp-sgd": {"train"},
    "merf": {"embedding"},
    "hermite": {"embedding"},
    "ntk": {"embedding"},
    "evolution": {"votes"},
    "central-images": {"central", "train"},
}
DELTA = 1e-5
TRAIN = "train: {rate: 0.1, steps: 9}"


def of(method: str, text: str = BASE) -> str:
    return f"{text}method: {method}\n"


def declared(plan: Plan) -> set[str]:
    return {name for name, stage in plan.stages if stage is not None}


@pytest.mark.parametrize("method", METHODS)
def test_one_line_changes_the_method_and_nothing_else(method: str) -> None:
    plan = parse_plan(of(method, changed("stages:\n", "stages:\n  evaluation: {}\n", BASE)))
    assert declared(plan) == STAGES[method] | {"evaluation"}
    facts, straight = plan.facts(), parse_plan(of("straightdp")).facts()
    assert facts["method"] == method
    assert {"embedding", "evolution", "central"} & facts.keys() == set()
    moved = {"method", "stages", "sampling", "distillation"}
    assert {k: v for k, v in facts.items() if k not in moved} == {
        k: v for k, v in straight.items() if k not in moved
    }
    draws = {"embedding": "generator", "votes": "population"}
    (first, *_) = sorted(STAGES[method])
    assert plan.sampling.method == draws.get(first, "flow")
    assert (plan.distillation is None) == (method != "straightdp")
    allocated = plan.stages.train is not None and plan.stages.train.allocation is not None
    assert allocated == (method == "straightdp")
    again = Plan.of_facts(facts)
    assert again.facts() == facts and plan_hash(again) == plan_hash(plan)


def test_settings_are_those_of_the_methods_own_section() -> None:
    kinds = {"merf": "fourier", "hermite": "hermite", "ntk": "tangent"}
    for method, kind in kinds.items():
        embedding = parse_plan(of(method)).stages.embedding
        assert embedding is not None
        assert (embedding.kind, embedding.features, embedding.width) == (kind, 20, 5)
    votes = parse_plan(of("evolution")).stages.votes
    assert votes is not None and (votes.rounds, votes.population) == (3, 5)
    bare = SMALL.replace("stages:\n  moments: {covariance: class}\n", "")
    bare = bare.replace("representation: {kind: pca, code: 4}\n", "")
    plan = parse_plan(of("merf", bare))  # no section, no stages, no representation
    assert declared(plan) == {"embedding"} and not plan.has_codes
    assert (plan.representation.kind, plan.representation.code) == ("pixels", 64)


def test_stages_may_be_declared_without_the_line() -> None:
    text = changed("moments: {covariance: class}", "embedding: {kind: hermite, pairs: 10}")
    plan = parse_plan(text.replace("method: release", "method: generator"))
    named = parse_plan(of("hermite", SMALL + "embedding: {pairs: 10}\n"))
    assert plan.method is None and plan.stages == named.stages
    # And the line chooses among stages that are all there.
    every = changed("stages:\n", "stages:\n  votes: {rounds: 2}\n  central: {}\n", TRAINED)
    assert declared(parse_plan(of("evolution", every))) == {"votes"}
    assert declared(parse_plan(of("central-images", every))) == {"central", "train"}
    assert declared(parse_plan(of("straightdp", every))) == {"moments", "train"}


def test_an_embedding_of_a_plan_with_tokens_is_of_pixels() -> None:
    plan = parse_plan(of("merf", TOKENS))
    assert plan.tokens is None and plan.representation.kind == "pixels"
    assert parse_plan(of("dp-sgd", TOKENS)).sampling.method == "tokens"


@pytest.mark.parametrize(
    ("text", "digest"),
    [
        (SMALL, "038ac8689fb92e0eec7da31d31f9d5fdd3bb8e553e2e0314e530f88d4ee1e9ce"),
        (TRAINED, "8e9b97b6f929658cda3ee3826367b0b4d6ef0d4eea416b33af901cb322cb514e"),
        (TOKENS, "f6fed48b98aa5dd7ff3910b88dd31eb29f2fb6d364a84be80b1392fe33d19351"),
        (celled(), "25ad5a5b4ae8c0e53a16c823dda48d799f4474266dc4a696f465968b37b74b8f"),
    ],
)
def test_plans_without_the_line_keep_their_hash(text: str, digest: str) -> None:
    assert plan_hash(parse_plan(text)) == digest


def test_shipped_plans_keep_their_hash() -> None:
    known = {
        "digits": "226645542d77e492ac0b4772302cad2a6f21840f31ffb3322b2c028dc0cb3da5",
        "mnist-straightdp": "af16d7cb40e294ce10eb5da7486e1637e005323262754f1a988cea5738a947b6",
        "emoji-wavelet": "00c19813191ae505cd040ce80f91c28932764e6d81f25772cb631767328fae57",
    }
    assert {name: plan_hash(load_plan(PLANS / f"{name}.yaml")) for name in known} == known


@pytest.mark.parametrize("name", ["dpsgd", "merf", "hermite", "ntk", "evolution", "central"])
def test_shipped_plans_differ_by_name_and_method_alone(name: str) -> None:
    def lines(file: str) -> list[str]:
        text = (PLANS / file).read_text()
        return text[text.index("version:") :].splitlines()

    straight = lines("mnist-straightdp.yaml")
    ours = [line for line in lines(f"mnist-{name}.yaml") if not line.startswith("method:")]
    assert len(ours) == len(straight)
    assert [a for a, b in zip(ours, straight, strict=True) if a != b] == [f"name: mnist-{name}"]


def test_the_embedding_is_one_gaussian_release() -> None:
    lock = verify(parse_plan(of("merf", changed("width: 5", "width: 5, spares: 1", BASE))))
    assert [(s.stage, s.name, s.release, s.spare) for s in lock.slots] == [
        ("embedding", "embedding", "embedding", False),
        ("embedding", "embedding-spare-1", "embedding", True),
    ]
    statistic = lock.slots[0].statistic
    assert isinstance(statistic, EmbeddingSums)
    assert (statistic.classes, statistic.dim) == (2, 20)
    m = lock.by_stage["embedding"]["noise_multiplier"]
    assert lock.epsilon == pytest.approx(gaussian.epsilon(DELTA, m / math.sqrt(2)), rel=1e-2)
    assert lock.delta_slack == discrete.delta_slack(2 * 2 * (1 + 20), 2.0**30, 2.0)


@pytest.mark.parametrize("spares", [0, 1])
def test_vote_rounds_compose_as_an_independent_accountant_says(spares: int) -> None:
    plan = parse_plan(of("evolution", changed("rounds: 3", f"rounds: 3, spares: {spares}", BASE)))
    lock = verify(plan)
    assert [s.name for s in lock.slots if not s.spare] == ["votes-01", "votes-02", "votes-03"]
    assert len(lock.slots) == 3 * (1 + spares)
    assert {s.statistic for s in lock.slots} == {VoteHistogram(bins=10)}
    m, (sigma,) = lock.by_stage["votes"]["noise_multiplier"], {s.noise_std for s in lock.slots}
    assert sigma == pytest.approx(m * math.sqrt(3), rel=1e-12)
    one = privacy_loss_distribution.from_gaussian_mechanism(
        sigma, sensitivity=1.0, value_discretization_interval=1e-4
    )
    composed = one.self_compose(len(lock.slots)).get_epsilon_for_delta(DELTA)
    assert lock.epsilon == pytest.approx(composed, rel=1e-2) and lock.epsilon <= 2.0
    assert lock.delta_slack == discrete.delta_slack(10 * len(lock.slots), 2.0**30, 2.0)


def planned(folder: Path, text: str) -> RunDir:
    (folder / "plan.yaml").write_text(text)
    return make_run(folder / "plan.yaml", folder / "runs" / "r").run


def release(spender: Spender, run: RunDir, name: str) -> None:
    slot = spender.release_slot(name)
    spender.charge(slot)
    path = run.released / f"{name}.safetensors"
    path.write_bytes(name.encode())
    spender.settle(slot, path)


def open_spending(run: RunDir) -> Any:
    lock = read_lock(run.lock)
    return spending(run, lock, calibration_hash="0" * 64, noise_source=lock.noise_source)


@pytest.fixture(scope="module")
def central(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A planned run with central images; sampled steps take seconds to calibrate."""
    return planned(tmp_path_factory.mktemp("central"), of("central-images"))


def test_central_images_are_sampled_steps_and_pay_for_each_draw(central: RunDir) -> None:
    plan, lock = parse_plan(of("central-images")), read_lock(central.lock)
    slot = lock.slots[0]
    assert [s.stage for s in lock.slots] == ["central", "train", "train"]
    assert (slot.rate, slot.steps, slot.statistic) == (0.1, 4, CentralSums(classes=2, dim=4))
    row, sampled = lock.by_stage["central"], dp_accounting.PoissonSampledDpEvent
    assert (row["executions"], row["rate"]) == (4, 0.1)
    accountant = PLDAccountant()
    accountant.compose(sampled(0.1, dp_accounting.GaussianDpEvent(slot.noise_std)), 4)
    assert row["epsilon_alone"] == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-2)
    train = lock.slots[1].noise_std / 0.5  # over the clip
    accountant.compose(sampled(0.05, dp_accounting.GaussianDpEvent(train)), 30)
    assert lock.epsilon == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-2)
    assert lock.delta_slack == discrete.delta_slack(4 * 2 * 4, 2.0**30, 2.0)
    for forged in (
        {"steps": 3},
        {"rate": 0.05},
        {"rate": None, "steps": None},
        {"statistic": CentralSums(classes=1, dim=4)},
        {"statistic": CentralSums(classes=2, dim=8)},
        {"noise_std": slot.noise_std / 2},
    ):
        slots = (dataclasses.replace(slot, **forged), *lock.slots[1:])
        assert not follows(dataclasses.replace(lock, slots=slots, lock_hash=""), plan)
    assert follows(lock, plan)


def test_rounds_are_charged_in_order_and_replayed(tmp_path: Path) -> None:
    run = planned(tmp_path, of("evolution"))
    names = ["votes-01", "votes-02", "votes-03"]
    with open_spending(run) as spender:
        with pytest.raises(BudgetError, match="comes after votes-01"):
            spender.charge(spender.release_slot("votes-02"))
        for name in names:
            release(spender, run, name)
            assert status(run).step("evolve").done is False  # the last population is not there
        spender.close()
    (one,) = replay(run.root).runs
    lock = read_lock(run.lock)
    assert (one.charges, one.settled, one.closed) == (3, 3, True)
    assert one.epsilon == lock.epsilon <= 2.0
    assert [(row.mechanism, row.executions) for row in one.rows] == [("votes: votes", 3)]
    (run.released / "votes-02.safetensors").write_bytes(b"other")
    with pytest.raises(ReplayError, match=r"votes-02\.safetensors is not what"):
        replay(run.root)


def test_replay_refuses_a_slack_that_pays_for_one_step_alone(
    central: RunDir, tmp_path: Path
) -> None:
    run = RunDir(tmp_path / "r")
    shutil.copytree(central.root, run.root)
    with open_spending(run) as spender:
        release(spender, run, "central")
    assert replay(run.transcript, partial=True).runs[0].rows[0].steps == 4
    opened, *others = read_transcript(run.transcript).lines
    opened["delta_slack"] = discrete.delta_slack(2 * 4, 2.0**30, 2.0)
    alone = tmp_path / "transcript.jsonl"
    alone.write_bytes(reseal([opened, *others]))
    with pytest.raises(ReplayError, match="does not pay for its discrete noise"):
        replay(alone, partial=True)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("merf", ["release-embedding", "fit"]),
        ("evolution", ["evolve"]),
        ("central-images", ["release-central", "warm-up", "train"]),
    ],
)
def test_steps_and_table_say_what_comes(
    method: str, expected: list[str], central: RunDir, tmp_path: Path
) -> None:
    run = central if method == "central-images" else planned(tmp_path, of(method))
    names = [step.name for step in status(run).steps]
    assert names == ["plan", "check", "pretrain", *expected, "sample", "evaluate"]
    notes = {"merf": "20 fourier features a class", "evolution": "3 rounds for 5 members",
             "central-images": "4 a class, of 50 expected records"}  # fmt: skip
    assert notes[method] in "\n".join(table._footnotes(read_lock(run.lock), "here"))


def test_many_equal_rounds_are_one_row() -> None:
    lock = verify(parse_plan(of("evolution", changed("rounds: 3", "rounds: 12", BASE))))
    named = [row[0] for row in table.rows(lock)]
    assert named == ["votes", "  votes-01 to votes-12", "composed", "budget"]
    assert len(table.as_json(lock)["rounds"]["votes"]) == 12


def added(lines: str, method: str = "merf") -> str:
    return of(method, changed(SETTINGS, lines, BASE))


def staged(stages: str, draws: str = "generator") -> str:
    text = changed("moments: {covariance: class}", stages)
    return text.replace("method: release", f"method: {draws}")


@pytest.mark.parametrize(
    ("text", "line", "message", "hint"),
    [
        (of("merff"), "method: merff", "'straightdp', 'dp-sgd', 'merf'", "did you mean"),
        (BASE, "embedding: {", "no `method:`", "add `method: merf`"),
        (added("central: {}\n", "merf") + "centrl: {}\n", "centrl", "unknown key", "`central:`?"),
        (added("embedding: {feature: 20}\n"), "feature: 20", "unknown key", "`features:`?"),
        (added("embedding: {features: 21}\n"), "features: 21", "multiple of 2", ""),
        (added("embedding: {kind: ntk}\n", "ntk"), "kind: ntk", "'tangent'", ""),
        (added("embedding: {kind: tangent}\n"), "kind: tangent", "is tangent", "leave `kind`"),
        (added("embedding: {features: 9000000}\n"), "features: 9", "at most 16777216", "lower"),
        (added("embedding: {pairs: 9999}\n", "hermite"), "pairs: 9999", "2016 pairs", "2016"),
        (added("embedding:\n"), "method: merf", "", None),
        # What the method drops must be sound all the same.
        (added("evolution: {round: 3}\n"), "round: 3", "unknown key", "`rounds:`?"),
        (added("central: {rate: 2}\n", "evolution"), "rate: 2", "below 1", ""),
        (of("merf", changed("rate: 0.05", "rate: -1", BASE)), "rate: -1", "above 0", ""),
        (added("evolution: {times: [0.9, 0.1]}\n", "evolution"), "times", "stronger", "0.1, 0.9"),
        (of("evolution", changed("5}", "5, x: 1}", BASE)), "x: 1", "unknown key", ""),
        (of("dp-sgd", SMALL), "method: dp", "needs stages.train", "add `train:"),
        (of("central-images", SMALL), "method: c", "needs stages.train", "add `train:"),
        (staged("central: {}", "flow"), "central: {}", "there is no train", "add `train:"),
        (of("evolution", TOKENS), "method: evolution", "has tokens", "leave `tokens` out"),
        (of("central-images", TOKENS), "method: central", "tokens", ""),
        (staged("embedding: {}", "flow"), "method: flow", "come from its generator", "generator"),
        (staged("votes: {}", "generator"), "method: gen", "needs stages.embedding", ""),
        (staged("moments: {}", "population"), "method: pop", "needs stages.votes", "flow"),
        (staged("embedding: {}\n  votes: {}"), "votes: {}", "by itself", "remove `votes`"),
        (staged("votes: {}\n  moments: {}"), "moments: {}", "by itself", "`method: ...`"),
        (staged(f"moments: {{}}\n  central: {{}}\n  {TRAIN}"), "central: {}", "two starts", ""),
        (staged("embedding: {}", "generator, steps: 9"), "steps: 9", "says nothing", "leave"),
        (staged("embedding: {}") + "distillation: {}\n", "distillation", "stages.moments", ""),
        (of("merf", staged("embedding: {}") + "embedding: {}\n"), "embedding", "both there", ""),
    ],
)  # fmt: skip
def test_faults_name_their_line(text: str, line: str, message: str, hint: str | None) -> None:
    if hint is None:  # an empty section is no section
        assert declared(parse_plan(text)) == {"embedding"}
        return
    with pytest.raises(PlanError) as caught:
        parse_plan(text)
    told = caught.value.message
    assert message in told and hint in caught.value.hint, (told, caught.value.hint)
    assert line in told, told


def test_dp_sgd_may_start_from_scratch() -> None:
    assert parse_plan(of("dp-sgd") + "prior: {steps: 0}\n").prior.steps == 0
    with pytest.raises(PlanError, match=r"transformer of tokens(.|\n)*steps: 0"):
        parse_plan(of("dp-sgd", TOKENS) + "prior: {steps: 0}\n")


def test_captions_are_of_no_other_method() -> None:
    text = changed("  classes: [a, b]", "  classes: [a, b]\n  captions: {kind: template, "
                   "template: '{class}'}")  # fmt: skip
    with pytest.raises(PlanError, match=r"captions|template"):
        parse_plan(of("merf", text))
