"""Keys of `stages.train`: old plans keep their hash, mistakes are named, docs name every key."""

from pathlib import Path

import pytest

from dpsynth.errors import PlanError
from dpsynth.planning.optimizer import Adam, AdamW, Schedule, Sgd
from dpsynth.planning.schema import Plan
from dpsynth.planning.training import Train
from dpsynth.planning.yaml_plan import parse_plan, plan_hash

ROOT = Path(__file__).parents[2]
FLOW = (ROOT / "plans" / "digits-flow.yaml").read_text()


def flow(lines=""):
    more = "".join(f"    {line}\n" for line in lines.splitlines())
    return parse_plan(FLOW.replace("    multiplicity: 4\n", "    multiplicity: 4\n" + more))


def test_the_defaults_are_what_plans_without_these_keys_mean():
    train = flow().stages.train
    assert train.optimizer == Adam(kind="adam", beta1=0.9, beta2=0.999, eps=1e-8)
    assert not train.optimizer.bias_correction
    assert train.schedule == Schedule(kind="constant", warmup=0)
    assert set(flow().facts()["stages"]["train"]) == {
        "weight", "rate", "steps", "chunk", "multiplicity", "clip", "buckets", "learning_rate",
        "ema", "label_dropout",
    }  # fmt: skip
    spelt = flow("optimizer: {kind: adam, beta1: 0.9}\nschedule: {kind: constant}")
    assert plan_hash(spelt) == plan_hash(flow())


CHOICES = [
    ("optimizer: {kind: sgd}", Sgd(kind="sgd")),
    ("optimizer: {kind: sgd, momentum: 0.9}", Sgd(kind="sgd", momentum=0.9)),
    ("optimizer: {kind: adam, bias_correction: true}", Adam(bias_correction=True)),
    (
        "optimizer: {kind: adam, bias_correction: true, floor: 0.5}",
        Adam(bias_correction=True, floor=0.5),
    ),
    ("optimizer: {kind: adamw, weight_decay: 1e-3}", AdamW(kind="adamw", weight_decay=1e-3)),
]


@pytest.mark.parametrize(("line", "expected"), CHOICES)
def test_a_chosen_optimizer_enters_the_hash_and_survives_the_lock(line, expected):
    plan = flow(line)
    assert plan.stages.train.optimizer == expected
    assert plan_hash(plan) != plan_hash(flow())
    again = Plan.of_facts(plan.facts())
    assert again.stages.train.optimizer == expected
    assert plan_hash(again) == plan_hash(plan)
    assert len({plan_hash(flow(text)) for text, _ in CHOICES}) == len(CHOICES)


def test_a_chosen_schedule_enters_the_hash():
    plan = flow("schedule: {kind: cosine, warmup: 5}")
    assert plan.stages.train.schedule == Schedule(kind="cosine", warmup=5)
    assert plan_hash(plan) != plan_hash(flow())


@pytest.mark.parametrize(
    ("line", "part", "hint"),
    [
        ("optimizer: {kind: lion}", 'got "lion", expected', "one of them"),
        ("optimizer: {momentum: 0.9}", "lacks the key `kind`", "kind: ..."),
        ("optimizer: {kind: adam, momentum: 0.9}", "unknown key", "beta1"),
        ("optimizer: {kind: sgd, momentun: 0.9}", "unknown key", "momentum"),
        ("optimizer: {kind: sgd, momentum: 1}", "expected a number below 1", "momentum"),
        ("optimizer: {kind: adam, weight_decay: 0.1}", "unknown key", "the keys here"),
        ("optimizer: {kind: adam, floor: 0}", "expected a number above 0", "floor"),
        ("optimizer: {kind: adamw, weight_decay: .nan}", "a finite number", "weight_decay"),
        ("optimizer: adam", "got", "optimizer: {kind: adam}"),
        ("schedule: {kind: step}", "expected 'constant', 'cosine' or 'linear'", "kind"),
        ("schedule: {warmup: -1}", "expected a number at least 0", "warmup"),
        ("schedule: {warmup: 100000}", "must end before the last", "change the plan"),
    ],
)  # fmt: skip
def test_mistakes_name_the_line_and_what_to_type(line, part, hint):
    with pytest.raises(PlanError) as caught:
        flow(line)
    at = next(i for i, text in enumerate(FLOW.splitlines(), 1) if "multiplicity" in text) + 1
    message = f"{caught.value} {caught.value.hint}"
    assert part in str(caught.value), message
    assert hint in str(caught.value.hint), message
    if "must end" not in part:  # a rule over two keys names their section's line
        assert f":{at}:" in message


@pytest.mark.parametrize("section", [Train, Sgd, Adam, AdamW, Schedule])
def test_the_docs_name_every_key(section):
    text = (ROOT / "docs" / "training.md").read_text()
    lacking = [key for key in section.model_fields if f"`{key}`" not in text]
    assert not lacking
