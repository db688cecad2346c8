"""`benchmarks.frozen`: its images, its checkpoint's form, its plan, its measures."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpsynth.planning.schema import Plan

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # it is no part of the package

from benchmarks.frozen import checkpoint, gap, plans, report, things, transformer
from benchmarks.frozen.sizes import COMPACT, TINY, Size


def grey(n=4, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (n, 28, 28)).astype(np.uint8)


def plan(size=COMPACT):
    return Plan.model_validate(plans.plan_of(Path("/prior"), Path("/a"), Path("/b"), size))


@pytest.mark.parametrize("style", ["warm", "cool"])
def test_a_style_keeps_to_its_box_of_colours_around_the_clothes(style):
    own, flat = things.STYLES[style], np.zeros((50, 28, 28), np.uint8)
    images = things.dyed(flat, own, seed=0) / 255  # nothing is worn: ground alone
    assert images.shape == (50, 32, 32, 3)
    np.testing.assert_array_equal(images, images[:, :1, :1].repeat(32, 1).repeat(32, 2))
    assert (np.abs(images - np.array(own.ground)) <= own.spread + 1 / 255).all()


def test_images_follow_from_the_seed_and_any_style_covers_the_others():
    same, other = (things.dyed(grey(), things.STYLES["any"], seed) for seed in (1, 1))
    np.testing.assert_array_equal(same, other)
    wide = things.STYLES["any"]
    for style in things.STYLES.values():
        for centre, middle in ((style.ground, wide.ground), (style.dye, wide.dye)):
            reach = np.abs(np.array(centre) - np.array(middle)) + style.spread
            assert (reach <= wide.spread + 1e-9).all()


@pytest.mark.skipif(not things.DATA.is_dir(), reason="no shared data here")
def test_private_sets_are_balanced_and_share_no_clothes():
    images, labels = things.private_set("warm", 40)
    assert np.bincount(labels).tolist() == [4] * 10
    held_out, _ = things.private_set("warm", 40, after=40)
    assert not (images[:, None] == held_out[None]).all((2, 3, 4)).any()
    halves = [things.clothes("t10k", part)[0] for part in (slice(0, 5000), slice(5000, 10000))]
    assert len(halves[0]) == len(halves[1]) == 5000


def test_the_plan_is_of_the_papers_budget_and_is_verified_without_the_checkpoint():
    from dpsynth.planning.verify import verify

    own = plan()
    assert own.private.capacity == 2040 and own.budget.delta == pytest.approx(1 / 4080)
    assert own.frozen.latent.dim == 16 * 16 * 16
    lock = verify(own)
    assert lock.epsilon == pytest.approx(2.0, rel=1e-3) and lock.epsilon <= 2.0
    assert {slot.statistic.to_json()["kind"] for slot in lock.slots} == {"class-means"}


@given(st.lists(st.floats(-5, 5), min_size=4, max_size=4), st.floats(-1, 2))
def test_both_shares_agree_on_the_way_itself_and_nothing_beats_along_elsewhere(off, share):
    p, q = np.zeros(4), np.array([1.0, 2.0, 0.0, -1.0])
    on = p + share * (q - p)
    assert gap.along(on, p, q) == pytest.approx(share, abs=1e-9)
    assert gap.closed(on, p, q) == pytest.approx(1 - abs(1 - share), abs=1e-9)
    a = on + np.array(off)
    assert gap.closed(a, p, q) <= gap.along(a, p, q) + 1e-9


def test_the_level_is_chosen_from_public_shares_alone():
    scores = {"0.8": {"latents along": 0.9}, "0.95": {"latents along": 0.55}}
    assert report.chosen({**scores, "0.98": {"latents along": 0.2}}) == 0.95
    assert report.chosen({"0.9": {"latents along": 0.1}}) == plans.SIGMA


def test_prompts_are_whole_words_and_tell_classes_apart():
    pytest.importorskip("transformers")
    words = checkpoint.tokenizer()
    texts = [checkpoint.PROMPT.format(label=label) for label in things.CLASSES]
    ids = [words(text).input_ids for text in texts]
    assert {len(one) for one in ids} == {7} and checkpoint.LENGTH >= 7
    assert len({one[5] for one in ids}) == 10
    padded = words(texts, padding="max_length", max_length=checkpoint.LENGTH, return_tensors="pt")
    with torch.no_grad():
        pooled = checkpoint.text_encoder(1)(input_ids=padded.input_ids).text_embeds
    assert torch.pdist(pooled).min() > 0.1


def test_one_token_for_all_of_t5s_gives_what_all_of_them_give():
    pytest.importorskip("diffusers")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = checkpoint.build_transformer(TINY)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        given_ = {
            "hidden_states": torch.randn(2, *TINY.latent),
            "timestep": torch.tensor([100.0, 900.0]),
            "pooled_projections": torch.randn(2, 2 * checkpoint.TEXT),
        }
        embeds = torch.randn(2, checkpoint.LENGTH + checkpoint.T5, 2 * checkpoint.TEXT)
        embeds[:, checkpoint.LENGTH :] = 0
    with torch.no_grad():
        whole = model(encoder_hidden_states=embeds, **given_).sample
        few = embeds[:, : 1 - checkpoint.T5]
        with transformer.one_for_all():
            one = model(encoder_hidden_states=few, **given_).sample
        plain = model(encoder_hidden_states=few, **given_).sample
    torch.testing.assert_close(one, whole, rtol=1e-4, atol=1e-5)
    assert (plain - whole).abs().max() > 100 * (one - whole).abs().max()  # the weight matters


def test_table_3_composes_to_no_more_than_its_sums():
    from benchmarks.frozen import accounting

    both = {"train": 10.0, "moments": 0.4}
    values = accounting.values("sd3-lora", both)
    assert values["budget"] == {"epsilon": 10.4, "delta": 1 / 4080}
    assert {stage: part["weight"] for stage, part in values["stages"].items()} == both
    assert set(accounting.ROWS) >= {"moment guidance", "distillation + DP-SGD"}


def test_the_whole_of_it_runs_on_a_tiny_prior(tmp_path, capsys):
    """Trained, saved, read back by dpsynth, spent on, guided and measured: a few seconds."""
    pytest.importorskip("diffusers")
    if not things.DATA.is_dir():
        pytest.skip("no shared data here")
    from benchmarks.frozen.runs import PRIVATE, Runs

    runs = Runs(tmp_path / "work", "tiny")
    runs.work.mkdir()
    found = runs.guided(PRIVATE, 0, 0.95, "released")
    assert runs.guided(PRIVATE, 0, 0.95, "released") == found  # kept
    assert set(found) == {f"{s} {m}" for s in gap.SPACES for m in ("along", "closed")} | {
        "agreement"
    }
    assert np.isfinite(list(found.values())).all()
    spent = (runs.work / "runs" / f"{PRIVATE}-0" / "done").read_text()
    assert spent.startswith("epsilon ") and float(spent.split()[1]) <= 2.0
    ceiling = runs.ceiling(PRIVATE)
    assert ceiling["latents closed"] > found["latents closed"]
    report.show_sweep(PRIVATE, {"0.95": found})
    assert "0.95" in capsys.readouterr().out
    json.dumps(found)


def test_sizes_say_what_they_are():
    assert Size(side=64, widths=(8, 8, 8)).latent == (16, 16, 16)
