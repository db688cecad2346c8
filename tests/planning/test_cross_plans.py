"""What a caption plan releases: statistics, lengths, slack, and what it refuses."""

import pytest
from plan_texts import SMALL, changed

from dpsynth.accounting.statistics import (
    CrossMoments,
    PaperClassSums,
    PaperCrossMoments,
    PaperSecondMoment,
    sensitivity,
)
from dpsynth.errors import DpsynthError
from dpsynth.planning import table
from dpsynth.planning.verify import make_run, verify
from dpsynth.planning.workload import coordinates, feature_dim, follows, has_constant
from dpsynth.planning.yaml_plan import load_plan

SLOTTED = "captions: {kind: template, template: 'a {size} {class}', slots: {size: [big, wee, odd]}}"


@pytest.fixture
def planned(tmp_path):
    """A plan whose moments stage has these keys, and whose private section this line."""

    def make(moments, private=""):
        text = changed("{covariance: class}", f"{{covariance: shared, {moments}}}")
        if private:
            text = changed("path: secret", "captions: captions, path: secret", text)
            text = changed("  held_out", f"  {private}\n  held_out", text)
        path = tmp_path / "plan.yaml"
        path.write_text(text)
        return load_plan(path)

    return make


@pytest.mark.parametrize(
    ("captions", "private", "features"),
    [
        ("features: one-hot", "", 2 + 1),
        ("features: one-hot, intercept: false", "", 2),
        ("features: one-hot", SLOTTED, 6 + 1),
        ("features: slots", SLOTTED, 3 + 2 + 1),
        ("features: sentence, encoder: minilm", SLOTTED, 384 + 1),
        ("features: sentence, encoder: minilm, width: 16", SLOTTED, 16 + 1),
    ],
)
def test_one_joint_mechanism_declares_its_features(planned, captions, private, features):
    plan = planned(f"captions: {{{captions}}}", private)
    lock = verify(plan)
    (slot,) = lock.slots
    assert slot.name == "cross-moments"
    assert isinstance(slot.statistic, CrossMoments)
    assert (slot.statistic.features, slot.statistic.dim) == (features, 4) == (feature_dim(plan), 4)
    assert sensitivity(slot.statistic) == pytest.approx(1)
    assert has_constant(plan) is ("intercept: false" not in captions)
    assert coordinates(slot.statistic) == features * (features + 1) // 2 + 4 * features + 10
    assert lock.delta_slack > 0
    assert follows(lock, plan)
    assert follows(lock, type(plan).of_facts(lock.facts))  # as replay asks


def test_blocks_and_projection_decide_the_weights_and_the_dimension(planned):
    blocks = "blocks: {caption: 1, cross: 1, second: 2}"
    plan = planned(f"projection: 3, spares: 1, captions: {{features: one-hot, {blocks}}}")
    first, spare = verify(plan).slots
    assert first.statistic == spare.statistic
    assert (first.name, spare.name) == ("cross-moments", "cross-moments-spare-1")
    assert first.statistic == CrossMoments(0.5, 0.5, 0.5**0.5, features=3, dim=3)


def test_the_papers_release_is_three_mechanisms_without_a_constant(planned):
    plan = planned("sensitivity: paper, captions: {features: one-hot}")
    statistics = [slot.statistic for slot in verify(plan).slots]
    assert statistics == [
        PaperClassSums(classes=1, dim=4),
        PaperSecondMoment(capacity=1000, dim=4),
        PaperCrossMoments(capacity=1000, features=2, dim=4),
    ]
    assert not has_constant(plan)
    noises = {slot.noise_std / sensitivity(slot.statistic) for slot in verify(plan).slots}
    assert max(noises) == pytest.approx(min(noises))


def test_class_moments_of_a_template_are_by_condition(planned):
    (slot,) = verify(planned("spares: 0", SLOTTED)).slots
    assert slot.statistic.classes == 6


def test_the_papers_constants_are_refused_for_units_of_several_images(tmp_path):
    text = changed("{covariance: class}", "{covariance: shared, sensitivity: paper, captions: "
                   "{features: one-hot}}")  # fmt: skip
    unit = "delta: 1e-5\n  unit: {column: patient, most: 4}"
    (tmp_path / "plan.yaml").write_text(changed("delta: 1e-5", unit, text))
    with pytest.raises(DpsynthError, match="sensitivity: tight"):
        make_run(tmp_path / "plan.yaml", tmp_path / "run")


def test_a_plan_without_captions_has_no_features(tmp_path):
    (tmp_path / "plan.yaml").write_text(SMALL)
    assert feature_dim(load_plan(tmp_path / "plan.yaml")) == 0


def test_the_plan_says_what_is_released_of_captions(planned):
    lock = verify(planned("spares: 1, captions: {features: one-hot}"))
    told = [line for line in table._footnotes(lock, "lock") if line.startswith("captions:")]
    assert told == [
        "captions: moments of caption features of 3 numbers, codes of 4, released together"
    ]


def test_a_slot_is_blamed_and_not_the_template_of_the_same_name_as_its_kind(planned):
    with pytest.raises(DpsynthError, match=r"`private\.captions\.slots\.size`") as caught:
        planned("captions: {features: slots}", SLOTTED.replace("[big, wee, odd]", "[]"))
    assert caught.value.hint == "write `size: `, a list of at least one"
