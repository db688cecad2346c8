"""A checkpoint in diffusers' layout: found, its weights hashed, and its shapes compared.

A folder, or a hub id: what the local cache has is used as it is, and only what it lacks is asked
of the hub.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dpsynth.artifacts.files import canonical_json, sha256_bytes, sha256_file
from dpsynth.errors import DpsynthError, MissingError, PlanError
from dpsynth.models.frozen.schedule import Schedule, schedule_of
from dpsynth.planning.frozen import FrozenPrior
from dpsynth.planning.schema import Plan

INSTALL = "pip install -e '.[sd3]'"
TRANSFORMER, VAE, SCHEDULER = "transformer", "vae", "scheduler"
_CONFIGS = {
    TRANSFORMER: "config.json",
    VAE: "config.json",
    SCHEDULER: "scheduler_config.json",
}
_WANTED = ["*.json", "*.txt", "*.model", "*.safetensors"]
_UNWANTED = ["*.fp16.safetensors", "*.fp16.*.safetensors", "*/onnx/*"]
_known: dict[tuple[Any, ...], str] = {}


@dataclass(frozen=True)
class Checkpoint:
    """A folder in diffusers' layout; of its parts those that run once text is encoded."""

    folder: Path
    family: str

    def config(self, part: str) -> dict[str, Any]:
        """A part's configuration. Raises MissingError where it is not there, or no JSON object."""
        path = self.folder / part / _CONFIGS[part]
        try:
            found = json.loads(path.read_bytes())
        except (OSError, ValueError):
            found = None
        if not isinstance(found, dict):
            raise MissingError(
                f"the checkpoint {self.folder} has no {part}/{path.name}",
                hint="name a folder in the layout of diffusers, with model_index.json in it",
            )
        return found

    @cached_property
    def weights_sha256(self) -> str:
        """SHA-256 over the names and SHA-256s of the configurations and weights of its parts.

        Computed once in a process while no file's size or time changes.

        Raises MissingError: a part has no weights as safetensors.
        """
        files = [path for part in _CONFIGS for path in self._files(part)]
        stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        key = (str(self.folder), *stats)
        if key not in _known:
            named = [[str(p.relative_to(self.folder)), sha256_file(p)] for p in files]
            _known[key] = sha256_bytes(canonical_json({"weights": named}))
        return _known[key]

    def schedule(self, tokens: int, *, even: bool) -> Schedule:
        """The noise levels of its scheduler, see `schedule_of`."""
        return schedule_of(self.config(SCHEDULER), tokens, even=even)

    def _files(self, part: str) -> list[Path]:
        self.config(part)
        folder = self.folder / part
        weights = [p for p in sorted(folder.glob("*.safetensors")) if ".fp16." not in p.name]
        if part != SCHEDULER and not weights:
            raise MissingError(
                f"the checkpoint {self.folder} has no {part}/*.safetensors",
                hint="save it again with diffusers: pipeline.save_pretrained(FOLDER)",
            )
        return [folder / _CONFIGS[part], *sorted(folder.glob("*.index.json")), *weights]


def open_checkpoint(plan: Plan) -> Checkpoint:
    """The checkpoint of the plan's frozen prior, its shapes compared with what the plan declares.

    Raises:
        PlanError: the plan's prior is not frozen, or latents or images have another shape.
        MissingError: the folder, a part of it, or the hub's files are not here.
    """
    prior = plan.frozen
    if prior is None:
        raise PlanError("the plan's prior is no frozen model of diffusers")
    found = Checkpoint(_folder_of(prior), prior.family)
    with loading("configuration", f"see the files config.json below {found.folder}"):
        _require_shapes(found, plan, prior)
    return found


@contextmanager
def loading(part: str, hint: str) -> Iterator[None]:
    """Say of anything that a part's files make the libraries raise that they are damaged.

    Raises MissingError.
    """
    try:
        yield
    except DpsynthError:
        raise
    except Exception as error:  # of several libraries, and any of a configuration's values
        raise MissingError(
            f"the checkpoint's {part} cannot be loaded ({type(error).__name__})", hint=hint
        ) from error


def require_whole(part: str, info: Mapping[str, Any]) -> None:
    """Refuse weights of which some are not in the files: libraries draw those anew each time.

    info: what a library says of its loading. Raises MissingError.
    """
    if missing := sorted(info.get("missing_keys", ())):
        raise MissingError(
            f"the checkpoint's {part} lacks {len(missing)} of its weights, such as {missing[0]}",
            hint="save it again with diffusers: pipeline.save_pretrained(FOLDER)",
        )


def require_weights(found: Checkpoint, wanted: str | None) -> None:
    """Refuse weights of another hash than the one that calibration recorded (PlanError)."""
    if wanted is not None and found.weights_sha256 != wanted:
        raise PlanError(
            f"the weights in {found.folder} are not those that this run was calibrated with",
            hint="put those back, or plan a new run: dpsynth plan PLAN --run runs/NEW",
        )


def _folder_of(prior: FrozenPrior) -> Path:
    if isinstance(prior.model, str):
        return _from_hub(prior.model, prior.revision)
    if not prior.model.is_dir():
        raise MissingError(
            f"prior.model: there is no folder {prior.model}",
            hint="correct `model` in the plan, or put the checkpoint there",
        )
    return prior.model


def _from_hub(name: str, revision: str | None) -> Path:
    """The files of a hub id: of the local cache where they are whole, else of the hub."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise MissingError("huggingface_hub is not installed", hint=INSTALL) from None
    asked = {"revision": revision, "allow_patterns": _WANTED, "ignore_patterns": _UNWANTED}
    try:
        cached = Path(snapshot_download(name, local_files_only=True, **asked))
        if all((cached / part / file).is_file() for part, file in _CONFIGS.items()):
            return cached
    except (OSError, ValueError):
        pass  # nothing of it is cached
    try:
        return Path(snapshot_download(name, **asked))
    except (OSError, ValueError) as error:
        raise MissingError(
            f"prior.model: {name} is not on this machine, and the hub did not give it "
            f"({type(error).__name__})",
            hint=f"on a machine with network: hf download {name}   (some models need its licence "
            "accepted and a token); or name a folder: `model: ./FOLDER`",
        ) from None


def _require_shapes(found: Checkpoint, plan: Plan, prior: FrozenPrior) -> None:
    latent, image = prior.latent, plan.private.image
    vae, transformer = found.config(VAE), found.config(TRANSFORMER)
    factor = 2 ** (len(vae.get("block_out_channels", [1])) - 1)
    packed = 4 if prior.family == "flux" else 1
    declared = (latent.channels, latent.height, latent.width)
    real = (vae.get("latent_channels"), image.height / factor, image.width / factor)
    if declared != real:
        made = f"({real[0]}, {real[1]:g}, {real[2]:g})"
        raise PlanError(
            f"prior.latent is {declared}, and the VAE makes {made} of images {image.height} x "
            f"{image.width} (channels, height, width)",
            hint="correct prior.latent or private.image in the plan",
        )
    if transformer.get("in_channels") != packed * latent.channels:
        raise PlanError(
            f"prior.family is {prior.family}, and the transformer takes "
            f"{transformer.get('in_channels')} channels where latents have "
            f"{packed * latent.channels}",
            hint="correct prior.family in the plan: sd3 or flux",
        )
    patch = int(transformer.get("patch_size") or 1)
    most = transformer.get("pos_embed_max_size")
    if most is not None and max(latent.height, latent.width) > int(most) * patch:
        raise PlanError(
            f"prior.latent is {latent.height} x {latent.width}, and the transformer has positions "
            f"for {int(most) * patch} at most",
            hint="declare smaller images in the plan",
        )
