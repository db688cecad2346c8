"""The public room of plans with spectral tokens: made, resumed, named by hash, and loaded."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import token_runs
import torch
from public_helpers import small_plan, stand_in
from spendkit import open_spending, spend

from dpsynth.artifacts.files import read_json, sha256_file
from dpsynth.artifacts.rooms import RunDir
from dpsynth.artifacts.settled import DERIVED
from dpsynth.errors import BudgetError, MissingError, ReplayError, UsageError
from dpsynth.models import text as words
from dpsynth.models.seeding import generator
from dpsynth.planning.evidence import _check_named
from dpsynth.public import token_stage, tokenizer
from dpsynth.public.job import Job
from dpsynth.public.pretrain import pretrain
from dpsynth.public.representation import load_representation
from dpsynth.public.sources import read_public
from dpsynth.public.token_stage import image_captions
from dpsynth.public.tokens import load_token_space, settings_of, sizes_of
from dpsynth.released.handout import hand_out

FILES = {"tokenizer.safetensors", "transformer.safetensors", "tokens.png", "calibration.json"}
CODES = 16


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    return token_runs.pretrained(tmp_path_factory.mktemp("tokens"))


@pytest.fixture(scope="module")
def space(done):
    return load_token_space(done.run, done.plan)


def images(count=6, seed=0):
    draw = generator(seed)
    return torch.randint(0, 256, (count, 8, 8, 1), generator=draw, dtype=torch.uint8).numpy()


def copied(done, folder):
    """A run with the same public room, to be spoilt."""
    verified = token_runs.planned(folder)
    for path in done.run.public.iterdir():
        shutil.copy2(path, verified.run.public / path.name)
    return verified


def test_the_room_holds_what_the_calibration_names(done):
    run, facts = done.run, read_json(done.run.calibration)
    assert {path.name for path in run.public.iterdir()} == FILES
    for name in ("tokenizer", "transformer"):
        assert facts[f"{name}_sha256"] == sha256_file(run.public / f"{name}.safetensors")
        assert f"public/{name}.safetensors" in DERIVED
    assert facts["dim"] == done.plan.representation.code == 4
    assert not {"radius", "tau", "geometry_sha256", "prior_sha256"} & facts.keys()
    tokens = facts["tokens"]
    assert (tokens["counts"], tokens["private"]) == ([4, 12], 4)
    assert tokens["decoded"][1] < tokens["decoded"][0] < tokens["mean"]
    assert tokens["kept"][1] < 1e-12 < tokens["kept"][0] < tokens["decoded"][0]
    assert sum(tokens["energy"]) == pytest.approx(1.0)
    losses = tokens["losses"]
    assert losses["uniform"] == pytest.approx(np.log(CODES))
    assert all(loss < losses["uniform"] for loss in (*losses["scales"], *losses["parts"]))
    assert [point["step"] for point in tokens["curve"]][-1] == 39


def test_no_private_or_public_path_is_in_the_room(done):
    for path in done.run.public.iterdir():
        assert str(done.run.root.parent).encode() not in path.read_bytes()


def test_images_go_to_tokens_and_back(space):
    given = images()
    ids = space.encode(given)
    assert (ids.shape, ids.dtype, space.dim, space.elementwise) == ((6, 16), torch.int64, 4, False)
    assert 0 <= int(ids.min()) <= int(ids.max()) < CODES
    exact = space.encode_exact(given)
    assert (exact.shape, exact.dtype) == ((6, 4), np.int64)
    np.testing.assert_array_equal(exact, ids[:, :4])
    whole, coarse = space.decode(ids), space.decode(ids[:, :4])
    assert whole.shape == coarse.shape == given.shape
    assert (whole.dtype, coarse.dtype) == (np.uint8, np.uint8)
    # A coarse prefix has no detail: it is constant on blocks of 2 by 2.
    np.testing.assert_array_equal(coarse[:, ::2, ::2], coarse[:, 1::2, 1::2])
    assert not np.array_equal(whole[:, ::2, ::2], whole[:, 1::2, 1::2])
    assert space.encode(given[:0]).shape == (0, 16)
    assert space.decode(ids[:0]).shape == (0, 8, 8, 1)
    with pytest.raises(UsageError, match="end inside a scale"):
        space.decode(ids[:, :7])
    with pytest.raises(UsageError, match="expected"):
        space.encode_exact(given[:, :4])


def test_a_records_private_tokens_depend_on_nothing_else(space):
    given = images(20, seed=1)
    alone = np.concatenate([space.encode_exact(given[n : n + 1]) for n in range(20)])
    np.testing.assert_array_equal(space.encode_exact(given), alone)
    np.testing.assert_array_equal(space.encode_exact(given[::-1])[::-1], alone)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        np.testing.assert_array_equal(space.encode_exact(given), alone)
    finally:
        torch.set_num_threads(threads)
    # Nor on detail: what moves no mean of 2 by 2 pixels moves no private token.
    fine = np.clip(given, 60, 180).astype(np.int16)
    other = fine.copy()
    other[:, ::2, ::2] += 50
    other[:, 1::2, 1::2] -= 50
    pair = [space.encode_exact(part.astype(np.uint8)) for part in (fine, other)]
    np.testing.assert_array_equal(*pair)


def test_sizes_and_captions_follow_the_plan(done, space):
    sizes = sizes_of(done.plan)
    assert space.transformer.sizes == sizes
    assert (sizes.tokens, sizes.coarse, sizes.approximation, sizes.codes) == (16, 4, 4, CODES)
    assert space.tokenizer.settings == settings_of(done.plan)
    assert torch.equal(space.text_of(["7", ""]), words.tokens(["7", ""], 2, 256))
    assert not any(p.requires_grad for p in space.transformer.parameters())
    assert not space.transformer.training


def test_raster_order_has_one_scale_all_private(tmp_path):
    verified = token_runs.pretrained(tmp_path, levels=0)
    space, given = load_token_space(verified.run, verified.plan), images()
    assert (space.dim, space.transformer.sizes.coarse, space.transformer.fine) == (16, None, None)
    assert len(space.tokenizer.codebooks) == 1
    np.testing.assert_array_equal(space.encode_exact(given), space.encode(given))
    tokens = read_json(verified.run.calibration)["tokens"]
    assert (tokens["energy"], tokens["counts"], tokens["private"]) == ([1.0], [16], 16)
    assert len(tokens["losses"]["parts"]) == len(tokens["losses"]["scales"]) == 1


def test_a_second_time_keeps_every_file(done, monkeypatch, capsys):
    before = {path.name: path.stat().st_mtime_ns for path in done.run.public.iterdir()}
    for name in ("token_stages", "pretrain_tokenizer", "pretrain_transformer", "report"):
        monkeypatch.setattr(token_stage, name, None)  # a call would raise
    assert pretrain(done) == read_json(done.run.calibration)
    assert "all there already" in capsys.readouterr().err
    assert before == {path.name: path.stat().st_mtime_ns for path in done.run.public.iterdir()}


@pytest.mark.parametrize("end", ["_transformer_stage", "write_json"])
def test_a_kill_between_stages_costs_no_stage_and_changes_nothing(done, end, tmp_path, monkeypatch):
    verified = token_runs.planned(tmp_path)

    class KilledError(Exception):
        pass

    def killed(*_):
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(token_stage, end, killed)
        with pytest.raises(KilledError):
            pretrain(verified)
    assert not verified.run.calibration.exists()
    monkeypatch.setattr(tokenizer, "fit_tokenizer", killed)  # it is there, and kept
    pretrain(verified)
    for name in FILES - {"tokens.png"}:
        assert (verified.run.public / name).read_bytes() == (done.run.public / name).read_bytes()


def test_lost_and_damaged_files_are_made_again(done, tmp_path):
    verified = copied(done, tmp_path)
    (verified.run.public / "transformer.safetensors").write_bytes(b"damaged")
    (verified.run.public / "tokens.png").unlink()
    verified.run.calibration.write_bytes(b"{")
    assert pretrain(verified) == read_json(done.run.calibration)
    assert (verified.run.public / "tokens.png").is_file()


def test_other_files_and_other_settings_are_refused(done, tmp_path):
    verified = copied(done, tmp_path)
    run, plan = verified.run, verified.plan
    for key, value in (("codebook", 8), ("hidden", 8)):
        made = plan.tokens.tokenizer.model_copy(update={key: value})
        other = plan.model_copy(
            update={"tokens": plan.tokens.model_copy(update={"tokenizer": made})}
        )
        with pytest.raises(UsageError, match="other settings"):
            load_token_space(run, other)
    wider = plan.tokens.transformer.model_copy(update={"width": 32})
    other = plan.model_copy(
        update={"tokens": plan.tokens.model_copy(update={"transformer": wider})}
    )
    with pytest.raises(UsageError, match="the plan expects"):
        load_token_space(run, other)
    with pytest.raises(UsageError, match="no spectral tokens"):
        load_token_space(run, small_plan())
    with pytest.raises(UsageError, match="learns tokens"):
        load_representation(run, plan)
    path = run.public / "transformer.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(UsageError, match=r"transformer\.safetensors is not the file"):
        load_token_space(run, plan)
    with pytest.raises(ReplayError, match=r"public/transformer\.safetensors is not the one"):
        _check_named(run.calibration)
    path.unlink()
    with pytest.raises(MissingError) as caught:
        load_token_space(run, plan)
    assert "dpsynth pretrain" in str(caught.value.hint)


def with_other(plan, part, key, value):
    """The plan with another value for a key of its section `tokens`."""
    made = getattr(plan.tokens, part).model_copy(update={key: value})
    return plan.model_copy(update={"tokens": plan.tokens.model_copy(update={part: made})})


def charged(verified):
    """The run after its first chunk of training was charged and settled."""
    digest = sha256_file(verified.run.calibration)
    with open_spending(verified.run, verified.lock, digest) as spender:
        spend(spender, verified.run, verified.lock.slots[0])


def test_nothing_changes_after_a_charge_and_the_hand_out_gives_back(done, tmp_path):
    verified = copied(done, tmp_path)
    run, facts = verified.run, read_json(verified.run.calibration)
    charged(verified)
    hand_out(run)
    for name in FILES - {"tokens.png"}:
        assert (run.released / "public" / name).is_file()
    card = (run.released / "card.md").read_text()
    assert "which completes the fine detail" in card
    for name in FILES - {"tokens.png"}:
        (run.public / name).unlink()
    assert pretrain(verified) == facts
    load_token_space(run, verified.plan)
    # Other public images would give another tokenizer: refused, and all is as it was.
    source = verified.plan.public[0].model_copy(update={"count": 150})
    other = Stand(verified.plan.model_copy(update={"public": [source]}), run)
    with pytest.raises(BudgetError, match=r"tokenizer\.safetensors would change"):
        pretrain(other)
    assert read_json(run.calibration) == facts
    changed = {**facts, "dim": 5}
    run.calibration.write_text(json.dumps(changed))
    with pytest.raises(ReplayError, match="charges name"):
        load_token_space(run, verified.plan)


@dataclasses.dataclass(frozen=True)
class Stand:
    """What `pretrain` reads of a VerifiedPlan."""

    plan: object
    run: RunDir


def test_another_kind_of_plan_has_tokens_beside_its_own_files(done, tmp_path):
    verified = token_runs.pretrained(tmp_path, **token_runs.FLOW)
    run, facts = verified.run, read_json(verified.run.calibration)
    names = {path.name for path in run.public.iterdir()}
    assert names >= FILES | {"geometry.safetensors", "prior.safetensors"}
    assert facts["dim"] == 6
    assert 0 < facts["tau"] < 1
    assert facts["radius"] > 0
    # The same images and settings: the same tokens, whatever stands beside them.
    mine = read_json(done.run.calibration)
    for key in ("tokenizer_sha256", "transformer_sha256", "tokens"):
        assert facts[key] == mine[key]
    assert load_token_space(run, verified.plan).dim == 4
    assert pretrain(verified) == facts
    (run.public / "tokenizer.safetensors").unlink()
    assert pretrain(verified) == facts


def test_captions_of_public_images(tmp_path):
    """Their own where they have any; else a condition's, by the label modulo their number."""
    path = tmp_path / "public.npz"
    labels = np.array([0, 1, 2, 3])
    texts = np.array(["a red bar", "", "a blue bar", "a dot"])
    np.savez(path, images=images(4)[..., 0], labels=labels, captions=texts)
    source = {"kind": "npz", "path": str(path), "captions": "captions"}
    private = small_plan().private.model_dump() | {
        "source": {"kind": "npz", "path": "/nonexistent.npz", "captions": "captions"},
        "captions": {"kind": "template", "template": "a {class}"},
    }
    named = small_plan(public=[source], private=private)
    plain = small_plan(public=[{"kind": "npz", "path": str(path)}])
    found = [
        image_captions(Job(plan, stand_in(plan, tmp_path / "run").run, read_public(plan)))
        for plan in (named, plain)
    ]
    assert found == [["a red bar", "", "a blue bar", "a dot"], ["a", "b", "c", "a"]]


def test_conditions_that_read_alike_are_refused(tmp_path):
    private = token_runs.DIGITS.replace('"0", "1"', '"zero", "Zero!"')
    verified = token_runs.planned(tmp_path, private=private)
    with pytest.raises(UsageError, match="same tokens") as caught:
        pretrain(verified)
    assert "tokens.transformer.text.vocabulary" in str(caught.value.hint)
