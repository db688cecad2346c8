"""A tokenizer as a safetensors file that says by itself what it holds."""

from pathlib import Path

import numpy as np
import torch

from dpsynth.artifacts.tensors import load_tensors, save_tensors
from dpsynth.errors import UsageError
from dpsynth.models.wavelet.tokenizer import Tokenizer, TokenizerSettings

FORMAT = "dpsynth-tokenizer-1"


def save_tokenizer(tokenizer: Tokenizer, path: Path, **facts: str) -> None:
    """Write a tokenizer atomically; `facts` are more metadata, such as the recipe's hash."""
    state = tokenizer.state_dict()
    arrays = {name: value.detach().cpu().contiguous().numpy() for name, value in state.items()}
    about = {"format": FORMAT, "room": "public", "settings": tokenizer.settings.to_text()}
    save_tensors(path, arrays, {**facts, **about})


def load_tokenizer(
    path: Path, settings: TokenizerSettings | None = None
) -> tuple[Tokenizer, dict[str, str]]:
    """Read a tokenizer in eval mode, its parameters frozen, and the file's metadata.

    Raises:
        MissingError: no such file.
        UsageError: damaged, of another format, or not of the `settings` that were asked for.
    """
    arrays, metadata = load_tensors(path)
    if metadata.get("format") != FORMAT:
        raise UsageError(f"{path.name} has format {metadata.get('format')!r}, expected {FORMAT!r}")
    found = TokenizerSettings.from_text(metadata.get("settings", ""))
    if settings is not None and found != settings:
        raise UsageError(
            f"{path.name} holds a tokenizer of other settings than the plan's",
            hint="start a new run folder with --run, then: dpsynth pretrain RUN",
        )
    tokenizer = Tokenizer(found)
    try:
        tokenizer.load_state_dict(
            {name: torch.from_numpy(np.array(value)) for name, value in arrays.items()}
        )
    except RuntimeError as error:
        raise UsageError(f"{path.name} does not hold what its own metadata declares") from error
    return tokenizer.eval().requires_grad_(False), metadata
