"""Plans with captions: what fits together, what is refused where, and what no hash may change."""

import json

import pytest
from planning.plan_texts import SMALL, changed

from dpsynth.errors import PlanError
from dpsynth.planning.schema import Plan
from dpsynth.planning.yaml_plan import parse_plan, plan_hash

NPZ = "source: {kind: npz, path: secret-records.npz}"
CAPTIONED = NPZ.replace("}", ", captions: said}")
TEMPLATE = "captions: {kind: template, template: 'a {size} {class}', slots: {size: [big, wee]}}"


def templated(captions=TEMPLATE, source=CAPTIONED, text=SMALL):
    return changed(NPZ, f"{source}\n  {captions}", text)


def free(text=SMALL):
    shared = "{covariance: shared, captions: {features: sentence, encoder: minilm}}"
    text = changed("{covariance: class}", shared, templated("captions: {kind: free}", text=text))
    text = changed("sampling: {", "sampling: {captions: said.txt, ", text)
    return text + "velocity: {kind: mmdit}\n"


def test_a_template_and_free_captions_are_plans():
    assert parse_plan(templated()).private.conditions == 4
    assert parse_plan(free()).private.conditions == 2
    parse_plan(templated(source="source: {kind: folder, path: x}"))


@pytest.mark.parametrize("make", [templated, free])
def test_facts_hold_no_path_and_make_the_same_plan_again(make):
    plan = parse_plan(make())
    again = Plan.of_facts(plan.facts())
    assert plan_hash(again) == plan_hash(plan)
    assert again.private.captions == plan.private.captions
    assert "said.txt" not in str(plan.facts()) and "npz.npz" not in str(plan.facts())
    moved = parse_plan(make().replace("said.txt", "other.txt").replace("secret-", "hidden-"))
    assert plan_hash(moved) == plan_hash(plan)


def test_where_an_encoder_lies_is_no_fact_but_the_packaged_one_is():
    one, other = parse_plan(free()), parse_plan(free().replace("minilm", "./minilm"))
    assert one.stages.moments.captions.encoder == "minilm"
    assert plan_hash(one) != plan_hash(other)
    elsewhere = parse_plan(free().replace("minilm", "/there/minilm"))
    assert plan_hash(other) == plan_hash(elsewhere)


def test_an_archives_captions_change_no_other_plans_hash():
    assert "captions" not in str(parse_plan(SMALL).facts())


ALIKE = "captions: {kind: template, template: '{size}{class}', slots: {size: [xa, x]}}"
WORDS = json.dumps({slot: [f"{slot}{n}" for n in range(64)] for slot in ("one", "two")})
MANY = f"captions: {{kind: template, template: '{{one}} {{two}} {{class}}', slots: {WORDS}}}"
MOMENTS = "moments: {covariance: class}"
SLOTS = "moments: {covariance: shared, captions: {features: slots}}"
HOT = "moments: {covariance: shared, captions: {features: one-hot}}"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (templated(source="source: {kind: digits}"), "source of kind digits has no captions"),
        (
            templated(source="source: {kind: idx, images: a, labels: b}"),
            "source of kind idx has no captions",
        ),
        (templated(source=NPZ), "name of the archive's array of captions"),
        (templated(ALIKE).replace("[a, b]", "[ab, b]"), "read alike"),
        (templated(MANY), "8192 fillings"),
        (
            templated().replace("  delta: 1e-5", "  delta: 1e-5\n  unit: {column: said, most: 2}"),
            "not whose it is",
        ),
        (
            templated(source="source: {kind: folder, path: x}").replace(
                "  delta: 1e-5", "  delta: 1e-5\n  unit: {column: text, most: 2}"
            ),
            "not whose it is",
        ),
        (changed(MOMENTS, SLOTS), "slots needs private.captions"),
        (free().replace("sentence, encoder: minilm", "one-hot"), "features: sentence"),
        (free().replace("captions: said.txt, ", ""), "sampling.captions"),
        (free().replace("velocity: {kind: mmdit}\n", ""), "mmdit"),
        (
            changed("sampling: {", "sampling: {captions: x.txt, ", changed(MOMENTS, HOT)),
            "captions of kind free",
        ),
    ],
)
def test_what_does_not_fit_is_said_with_a_line_and_a_hint(text, wanted):
    with pytest.raises(PlanError, match=wanted) as error:
        parse_plan(text)
    assert error.value.exit_code == 2 and error.value.hint and "plan.yaml:" in str(error.value)


def test_one_hot_features_need_no_captions():
    plan = parse_plan(changed(MOMENTS, HOT))
    assert plan.private.captions is None and plan.private.conditions == 2
