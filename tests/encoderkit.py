"""A tiny sentence encoder on disk: a random BERT in the layout of sentence-transformers."""

import json

import torch

WORDS = ["a", "big", "wee", "cat", "dog", "emu", "##s", "of", "on", "sofa"]
DIM = 16


def write_encoder(folder, *, pooling="mean", normalise=True, seed=0, length=12):
    """Write the folder and return it. Needs transformers."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    folder.mkdir(parents=True)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocab = {word: number for number, word in enumerate([*special, *WORDS])}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ends = [("[CLS]", vocab["[CLS]"]), ("[SEP]", vocab["[SEP]"])]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=ends
    )
    names = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **{f"{key}_token": value for key, value in names.items()}
    ).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(vocab),
        hidden_size=DIM,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = BertModel(config)
    with torch.no_grad():  # BERT starts so small that all texts look alike
        for parameter in model.parameters():
            parameter.mul_(10 if parameter.ndim > 1 else 1)
    model.save_pretrained(folder, safe_serialization=True)
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalise else [])]
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for n, (kind, path) in enumerate(zip(kinds, paths, strict=False))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    chosen = {"mean": "mean_tokens", "cls": "cls_token"}[pooling]
    modes = {f"pooling_mode_{m}": m == chosen for m in ("cls_token", "mean_tokens", "max_tokens")}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(modes))
    settings = {"max_seq_length": length, "do_lower_case": False}
    (folder / "sentence_bert_config.json").write_text(json.dumps(settings))
    return folder
