"""Plans with spectral tokens: what goes together, what training on them means, locks that hold."""

import json
from pathlib import Path

import numpy as np
import pytest
from plan_texts import SMALL, TOKENS, TRAINED, changed

from dpsynth.accounting.statistics import ClippedGradientSum
from dpsynth.artifacts.lock import read_lock
from dpsynth.artifacts.samples import SamplesWriter
from dpsynth.errors import PlanError
from dpsynth.planning import table
from dpsynth.planning.schema import Plan
from dpsynth.planning.section import Section
from dpsynth.planning.steps import status
from dpsynth.planning.tokens import SpectralTokenizer, Tokens, TokenTransformer
from dpsynth.planning.verify import load_verified, make_run, verify
from dpsynth.planning.workload import follows
from dpsynth.planning.yaml_plan import parse_plan, plan_hash

TOKENS_LINE = "tokens: {wavelet: haar, levels: 1, tokenizer: {patches: [2, 2]}}\n"
TRAIN = "train: {rate: 0.05, steps: 30, chunk: 20}"
COMPLETED = SMALL + "tokens: {levels: 2, tokenizer: {patches: [1, 1, 2]}}\n"
FLOW = TRAINED.replace("method: release", "method: flow")


def complaint(text: str) -> tuple[str, str]:
    with pytest.raises(PlanError) as caught:
        parse_plan(text)
    return caught.value.message, str(caught.value.hint)


def test_the_code_is_what_training_sees_and_there_is_one_image_a_step() -> None:
    plan = parse_plan(TOKENS)
    assert plan.representation.code == 4  # LL0 of 8x8 has 4x4 numbers: four squares of 2x2
    train = plan.stages.train
    assert train is not None
    assert (train.multiplicity, train.buckets) == (1, 1)
    assert plan.learns_tokens and plan.is_completed
    wider = TOKENS.replace("levels: 1, tok", "levels: 2, private: 1, tok").replace(
        "[2, 2]", "[1, 1, 2]"
    )
    assert parse_plan(wider).representation.code == 2 * 2 + 3 * 2 * 2
    raster = TOKENS.replace("levels: 1", "levels: 0").replace("[2, 2]", "[2]")
    assert parse_plan(raster).representation.code == 16
    assert not parse_plan(raster).is_completed


def test_units_of_several_images_may_show_several_a_step() -> None:
    folder = changed("{kind: npz, path: secret-records.npz}", "{kind: folder, path: x}", TOKENS)
    text = changed("delta: 1e-5", "delta: 1e-5\n  unit: {column: patient, most: 8}", folder)
    train = parse_plan(text.replace("chunk: 20", "chunk: 20, multiplicity: 3")).stages.train
    assert train is not None and (train.multiplicity, train.buckets) == (3, 1)


def test_older_plans_know_nothing_of_tokens() -> None:
    facts = parse_plan(SMALL).facts()
    assert "tokens" not in facts
    assert not {"temperature", "top_k"} & set(facts["sampling"])
    train = parse_plan(TRAINED).facts()["stages"]["train"]
    assert not {"parameters", "lora"} & set(train)
    assert (train["multiplicity"], train["buckets"]) == (4, 4)


@pytest.mark.parametrize(
    "text", [TOKENS, COMPLETED, TOKENS.replace(", count: 20}", ", count: 20, top_k: 9}")]
)
def test_the_lock_says_it_all(text: str) -> None:
    plan = parse_plan(text)
    again = Plan.of_facts(json.loads(json.dumps(plan.facts())))
    assert plan_hash(again) == plan_hash(plan)
    assert again.tokens == plan.tokens
    assert follows(verify(plan), again)


@pytest.mark.parametrize(
    ("change", "message", "hint"),
    [
        (("levels: 1", "levels: 1, private: 1"), "some scale must be left", "`private: 0`"),
        ((TOKENS_LINE, "tokens: {levels: 3}\n"), "leaves 1 x 1 of an image", "`levels: 2` or"),
        (("[2, 2]", "[2]"), "lists 1, and levels: 1 takes 2", "each scale"),
        ((TOKENS_LINE, ""), "needs the section `tokens`", "levels: 3"),
        (("{kind: tokens}", "{kind: tokens, code: 5}"), "code is 5", "without `code`"),
        (("{kind: tokens}", "{kind: tokens, levels: 1}"), "only for `kind: wavelet`", "`tokens:`"),
        (("{kind: tokens}", "{kind: tokens, clip_quantile: 0.5}"), "says nothing of", "leave"),
        ((TRAIN, "moments: {}"), "no numbers whose moments", "kind: wavelet"),
        ((TRAIN, "moments: {}\n  " + TRAIN), "no numbers whose moments", "remove"),
        (("chunk: 20", "chunk: 20, multiplicity: 4"), "multiplicity is 4", "leave"),
        (("chunk: 20", "chunk: 20, buckets: 2"), "has no times", "leave"),
        (("chunk: 20", "chunk: 20, allocation: {}"), "has no times", "remove"),
        (("chunk: 20", "chunk: 20, parameters: last"), "is for flows", "parameters: lora"),
        (("chunk: 20", "chunk: 20, lora: {rank: 4}"), "only for `parameters: lora`", "lora"),
        (("method: tokens", "method: flow"), "token by token", "{method: tokens}"),
        (("method: tokens, ", ""), "method: release", "{method: tokens}"),
        ((", count: 20}", ", count: 20, steps: 9}"), "sampling.steps says nothing", "leave"),
        ((", count: 20}", ", count: 20, sharpen: public}"), "sampling.sharpen says", "leave"),
        ((", count: 20}", ", count: 20, augment: {}}"), "sampling.augment says", "leave"),
        (("public:", "velocity: {width: 9}\npublic:"), "a transformer of its own", "`tokens:`"),
        (("public:", "distillation: {}\npublic:"), "has none", "remove `distillation`"),
    ],
)  # fmt: skip
def test_what_means_nothing_to_tokens_is_named(
    change: tuple[str, str], message: str, hint: str
) -> None:
    told, typed = complaint(changed(*change, TOKENS))
    assert message in told and hint in typed, (told, typed)
    assert told.startswith("plan.yaml:") and told.count("\n") == 1, told


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        (
            SMALL.replace(", count: 20}", ", count: 20, temperature: 0.5}"),
            "section `tokens`",
            "leave",
        ),
        (SMALL.replace(", count: 20}", ", count: 20, top_k: 5}"), "section `tokens`", "leave"),
        (SMALL.replace("method: release", "method: tokens"), "kind is pca", "kind: tokens"),
        (SMALL + "tokens: {levels: 0}\n", "nothing to complete", "`levels: 1` or more"),
        (
            COMPLETED.replace(", count: 20}", ", count: 20, augment: {}}"),
            "completed after",
            "leave",
        ),
        (FLOW.replace("clip: 0.5", "parameters: lora"), "{kind: tokens}", "attention"),
        (FLOW.replace("clip: 0.5", "parameters: attention"), "mlp has none", "mmdit"),
    ],
)
def test_plans_of_another_kind_say_what_they_cannot(text: str, message: str, hint: str) -> None:
    told, typed = complaint(text)
    assert message in told and hint in typed, (told, typed)


def test_what_goes_together_is_taken() -> None:
    assert parse_plan(COMPLETED).is_completed and not parse_plan(COMPLETED).learns_tokens
    attention = FLOW.replace("clip: 0.5", "parameters: attention")
    for kind in ("transformer", "mmdit"):
        parse_plan(attention + f"velocity: {{kind: {kind}}}\n")
    factors = parse_plan(TOKENS.replace("chunk: 20", "parameters: lora, lora: {rank: 4}"))
    train = factors.stages.train
    assert train is not None and train.lora.rank == 4
    assert plan_hash(factors) != plan_hash(parse_plan(TOKENS))


def planned(folder: Path, text: str) -> Path:
    (folder / "plan.yaml").write_text(text)
    return make_run(folder / "plan.yaml", folder / "run").run.root


def write_folder(folder: Path, **origin: object) -> None:
    """A finished folder of one sample."""
    writer = SamplesWriter(folder, ["a", "b"], origin=origin)
    writer.add(np.zeros((1, 8, 8, 1), np.uint8), np.array([0]))
    writer.finish()


@pytest.mark.parametrize("text", [TOKENS, COMPLETED])
def test_sampling_is_over_with_the_coarse_folder_and_completing_with_the_full_one(
    text: str, tmp_path: Path
) -> None:
    run = load_verified(planned(tmp_path, text)).run
    names = [step.name for step in status(run).steps]
    assert names[-3:] == ["sample", "complete-wavelet", "evaluate"]

    def done() -> tuple[bool, bool]:
        found = status(run)
        return tuple(found.step(n).done for n in ("sample", "complete-wavelet"))

    assert done() == (False, False)
    write_folder(run.released / "coarse", count=1)
    assert done() == (True, False)
    write_folder(run.released / "samples", coarse={"count": 1})
    assert done() == (True, True)
    (run.released / "coarse" / "metadata.csv").unlink()
    write_folder(run.released / "coarse", count=2)  # drawn anew: completed anew
    assert done() == (True, False)


def test_raster_order_needs_no_completion(tmp_path: Path) -> None:
    text = TOKENS.replace("levels: 1", "levels: 0").replace("[2, 2]", "[2]")
    run = load_verified(planned(tmp_path, text)).run
    assert status(run).step("complete-wavelet") is None
    write_folder(run.released / "samples")
    assert status(run).step("sample").done


def test_the_lock_charges_training_as_any_other_and_the_table_says_of_what(tmp_path: Path) -> None:
    lock = read_lock(load_verified(planned(tmp_path, TOKENS)).run.lock)
    assert [slot.statistic for slot in lock.slots] == [ClippedGradientSum(clip=1.0)] * 2
    assert [slot.steps for slot in lock.slots] == [20, 10]
    notes = list(table._footnotes(lock, "x"))
    assert any("4 of an image (scale 0 (LL0)) are learned privately, the 12" in n for n in notes)
    completed = list(table._footnotes(verify(parse_plan(COMPLETED)), "x"))
    assert any("completed with" in n for n in completed)
    encoded = TOKENS.replace("levels: 1,", "levels: 1, transformer: {encoder: /a/folder},")
    assert any("learned privately" in n for n in table._footnotes(verify(parse_plan(encoded)), "x"))
    assert not any("tokens" in n for n in table._footnotes(verify(parse_plan(SMALL)), "x"))


@pytest.mark.parametrize("section", [Tokens, SpectralTokenizer, TokenTransformer])
def test_the_docs_name_every_key(section: type[Section]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "tokens.md").read_text()
    assert not [key for key in section.model_fields if f"`{key}`" not in text]
