"""Spectral tokens whose captions a frozen sentence encoder reads: one reading, everywhere."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from encoderkit import DIM, write_encoder
from token_runs import token_plan

from dpsynth.artifacts.files import read_json, sha256_file
from dpsynth.errors import MissingError, PlanError, UsageError
from dpsynth.models.seeding import generator
from dpsynth.models.sentence import folder_sha256, load_encoder
from dpsynth.models.wavelet.autoregressive import save_transformer
from dpsynth.planning.facts import with_paths
from dpsynth.planning.schema import Plan
from dpsynth.planning.tokens import TokenTransformer
from dpsynth.planning.verify import load_verified, make_run
from dpsynth.planning.yaml_plan import load_plan, plan_hash
from dpsynth.private.encoding import UnitCodes
from dpsynth.private.engine import PerExampleClipper
from dpsynth.private.noise import NoiseSource
from dpsynth.private.token_task import TokenTask
from dpsynth.public.pretrain import pretrain
from dpsynth.public.token_captions import caption_reader
from dpsynth.public.tokens import load_token_space, sizes_of
from dpsynth.released.completion import complete_wavelet
from dpsynth.released.sampling import sample

WORDS_TEXT = "text: {width: 8, length: 2}"
FREE = """\
private:
  source: {kind: npz, path: private.npz, captions: said}
  captions: {kind: free}
  capacity: 90
  image: {height: 8, width: 8}
  classes: [cat, dog]
  held_out: {by: hash, fraction: 0.2}"""
DRAWN = "{method: tokens, count: 6, captions: public.txt}"


def encoded_plan(folder, *, encoder="encoder", width=DIM, private=FREE, **changes):
    """The tiny plan with an encoder in place of the table of words."""
    path = token_plan(folder, private=private, sampling=DRAWN, **changes)
    said = f"encoder: {encoder}" + (f", encoder_width: {width}" if width else "")
    path.write_text(path.read_text().replace(WORDS_TEXT, said))
    (folder / "public.txt").write_text("a big cat\na wee dog\nan emu or dog\n")
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A pretrained run of free captions, with a model, and its folder."""
    folder = tmp_path_factory.mktemp("encoded")
    write_encoder(folder / "encoder")
    verified = make_run(encoded_plan(folder), folder / "run")
    pretrain(verified)
    space = load_token_space(verified.run, verified.plan)
    save_transformer(
        space.transformer, verified.run.released / "model.safetensors", room="released"
    )
    return folder


@pytest.fixture
def run(made, tmp_path):
    """A copy of it, to be spoilt: run and encoder lie elsewhere."""
    shutil.copytree(made, tmp_path / "moved")
    folder = tmp_path / "moved"
    record = folder / "run" / "curator" / "source.json"
    record.write_text(record.read_text().replace(str(made), str(folder)))
    return load_verified(folder / "run")


def test_an_encoder_is_a_fact_of_the_plan_and_its_folder_is_not(tmp_path):
    plan = load_plan(encoded_plan(tmp_path / "a", width=None))
    stated = load_plan(encoded_plan(tmp_path / "b", encoder="other/place", width=384))
    assert plan.tokens.transformer.encoder == tmp_path / "a" / "encoder"
    assert plan.tokens.transformer.encoder_width == 384
    assert plan_hash(plan) == plan_hash(stated)
    facts = json.loads(json.dumps(plan.facts()))
    assert str(tmp_path) not in json.dumps(facts)
    again = Plan.of_facts(facts)
    assert plan_hash(again) == plan_hash(plan)
    assert again.tokens.transformer.encoder == Path("-")
    named = load_plan(encoded_plan(tmp_path / "c", encoder="minilm", width=None))
    assert named.tokens.transformer.encoder == "minilm"
    assert Plan.of_facts(named.facts()).tokens == named.tokens
    words = load_plan(token_plan(tmp_path / "d"))
    assert len({plan_hash(each) for each in (plan, named, words)}) == 3
    # Plans without one are what they were: no key, no placeholder.
    said = words.facts()["tokens"]["transformer"]
    assert not {"encoder", "encoder_width"} & said.keys()
    assert with_paths(said) == said
    sizes = sizes_of(plan)
    assert (sizes.text.length, sizes.text.width) == (1, 384)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"encoder_width": 16}, "given with `encoder`"),
        ({"encoder": "minilm", "encoder_width": None}, "given with `encoder`"),
        ({"encoder": "minilm", "text": {"length": 3}}, "of the table of words"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        TokenTransformer.model_validate(keys)


def test_captions_are_scaled_embeddings_each_read_alone(made):
    settings = load_plan(made / "plan.yaml").tokens.transformer
    reader, encoder = caption_reader(settings), load_encoder(made / "encoder")
    captions = ["a big cat", "wee dogs", "a big cat", "", " ... ", "on sofa"]
    found = reader(captions)
    assert (found.shape, found.dtype) == ((6, 1, DIM), torch.float32)
    for caption, row in zip(captions, found.numpy(), strict=True):
        raw = encoder.embed([caption])[0]
        wanted = raw / np.sqrt(np.mean(raw**2)) if any(map(str.isalnum, caption)) else 0 * raw
        np.testing.assert_allclose(row[0], wanted, rtol=1e-6)
    alone = torch.cat([reader([caption]) for caption in captions])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.equal(reader(captions[::-1]).flip(0), alone)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found, alone)
    assert reader([]).shape == (0, 1, DIM)


def test_an_embedding_that_is_no_number_is_the_empty_caption(made, monkeypatch):
    reader = caption_reader(load_plan(made / "plan.yaml").tokens.transformer)
    bad = np.full((1, DIM), np.nan)
    monkeypatch.setattr(type(reader.encoder), "embed", lambda *_: bad)
    assert not reader(["a cat"]).any()
    bad[0, 1:] = np.inf
    assert not reader(["a cat"]).any()


def test_training_and_sampling_see_the_same_numbers(run):
    space = load_token_space(run.run, run.plan)
    public = ["cat", "dog"]
    task = TokenTask.load(run.run, run.plan)
    assert torch.equal(task.work.table, space.text_of(public))
    assert not task.work.null.any()
    assert torch.equal(space.transformer.null(task.work.table), 0 * task.work.table)
    # Private captions in memory, in the records' order, each the bits that it has alone.
    said = ("a big cat", "", "wee dogs")
    ids = np.zeros((3, space.dim), np.int32)
    data = task.take([UnitCodes(ids, np.zeros(3, np.int64), captions=said)])
    assert data.labels.tolist() == [0, 1, 2]
    assert torch.equal(task.work.table, torch.cat([space.text_of([each]) for each in said]))
    before = {path.name for path in run.run.root.rglob("*")}
    batch = task.work.batch(data, rate=1.0, step=0, noise=NoiseSource(), source=generator(0))
    assert [each.shape for each in batch] == [(3, space.dim), (3, 1, DIM)]
    with PerExampleClipper(task.model, task.losses, 0.05) as clipper:
        sums = [clipper.clipped_sum(*(each[rows:] for each in batch)) for rows in (0, 1)]
    off = [sums[0].gradients[name] - each for name, each in sums[1].gradients.items()]
    moved = float(torch.cat([each.flatten() for each in off]).norm())
    assert 0.02 < moved <= 0.05  # what the first record adds
    assert {path.name for path in run.run.root.rglob("*")} == before


def test_the_transformer_draws_from_what_captions_say(run):
    """Other captions, other logits: the encoder's numbers do reach the tokens."""
    space = load_token_space(run.run, run.plan)
    ids = torch.zeros(2, 4, dtype=torch.int64)
    one, other = space.transformer(ids, space.text_of(["a big cat", "wee dogs"]))
    assert not torch.allclose(one, other)


def test_the_calibration_names_the_encoder(run, made):
    facts = read_json(run.run.calibration)
    assert facts["encoder_sha256"] == folder_sha256(made / "encoder")
    before = {p.name: sha256_file(p) for p in run.run.public.iterdir()}
    assert pretrain(run) == facts  # another place, the same encoder: nothing is made again
    assert {p.name: sha256_file(p) for p in run.run.public.iterdir()} == before
    folder = run.plan.tokens.transformer.encoder
    path = folder / "sentence_bert_config.json"
    path.write_text(path.read_text().replace("12", "11"))
    space = load_token_space(run.run, run.plan)
    with pytest.raises(UsageError, match="encoder is not the one"):
        space.text_of(["a cat"])
    with pytest.raises(UsageError, match="encoder is not the one"):
        TokenTask.load(run.run, run.plan)
    # Another encoder makes another transformer, and is named.
    assert pretrain(run)["encoder_sha256"] == folder_sha256(folder)
    assert sha256_file(run.run.public / "tokenizer.safetensors") == before["tokenizer.safetensors"]
    assert (
        sha256_file(run.run.public / "transformer.safetensors")
        != (before["transformer.safetensors"])
    )


def test_a_calibration_without_the_encoders_hash_is_refused(run):
    facts = read_json(run.run.calibration)
    del facts["encoder_sha256"]
    run.run.calibration.write_text(json.dumps(facts))
    with pytest.raises(UsageError, match="encoder is not the one"):
        load_token_space(run.run, run.plan).text_of(["a cat"])


def test_sampling_and_completion_need_the_encoder_and_say_so(run):
    sample(run)
    complete_wavelet(run)
    lines = (run.run.released / "samples" / "metadata.csv").read_text()
    assert "a big cat" in lines
    shutil.rmtree(run.run.released / "samples")
    shutil.rmtree(run.plan.tokens.transformer.encoder)
    space = load_token_space(run.run, run.plan)  # images need no encoder
    assert space.decode(space.encode(np.zeros((1, 8, 8, 1), np.uint8))).shape == (1, 8, 8, 1)
    for command in (complete_wavelet, lambda each: sample(each, 5), pretrain):
        with pytest.raises(MissingError, match="there is none at") as caught:
            command(run)
        assert "`encoder:` under tokens.transformer" in str(caught.value.hint)
        assert caught.value.exit_code == 6
    assert not (run.run.released / "samples").exists()


def test_a_width_that_the_encoder_has_not_is_refused(made, tmp_path):
    plan = load_plan(encoded_plan(tmp_path, encoder=made / "encoder", width=8))
    with pytest.raises(PlanError, match="encoder_width is 8") as caught:
        caption_reader(plan.tokens.transformer)
    assert f"encoder_width: {DIM}" in str(caught.value.hint)


def test_conditions_that_embed_alike_are_refused(made):
    reader = caption_reader(load_plan(made / "plan.yaml").tokens.transformer)
    reader.require_distinct(["cat", "dog", "emu"])
    with pytest.raises(UsageError, match="'yak' and 'gnu' have the same embedding"):
        reader.require_distinct(["cat", "yak", "gnu"])  # no words that this encoder knows
    with pytest.raises(UsageError, match="'' and '!' have the same embedding"):
        reader.require_distinct(["cat", "!"])


def test_processes_compare_what_captions_become(run):
    from dpsynth.private.coding import TokenCodes
    from dpsynth.private.together import require_same_codes

    class Pair:
        """One of two processes."""

        world, rank = 2, 0

        def __init__(self):
            self.said = []

        def require_same(self, what, value):
            self.said.append((what, value))

    found = []
    for shift in (0.0, 1e-6):
        space = load_token_space(run.run, run.plan)
        whole = space._reader

        def off(captions, whole=whole, shift=shift):
            return whole(captions) + shift

        space.__dict__["_reader"] = off
        ranks = Pair()
        require_same_codes(TokenCodes(space), ranks)
        found.append(ranks.said)
    assert found[0] != found[1]
