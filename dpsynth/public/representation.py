"""The public code space: records in, centred and scaled codes out, and back.

A code is (c - m) / s, where c is the raw code of an image, m the public mean and s the public
root mean square over all coordinates, so that flows start near unit variance.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpsynth.artifacts.files import read_json, sha256_file
from dpsynth.artifacts.rooms import RunDir
from dpsynth.artifacts.settled import require_calibration
from dpsynth.artifacts.tensors import load_tensors, save_tensors
from dpsynth.errors import MissingError, UsageError, typed
from dpsynth.models.autoencoder import ConvAutoencoder, as_bytes, build_autoencoder, pixels
from dpsynth.models.frozen.checkpoint import open_checkpoint, require_weights
from dpsynth.models.frozen.latents import LatentCodec
from dpsynth.models.threads import one_thread
from dpsynth.planning.schema import ImageShape, Plan
from dpsynth.public.geometry import PcaCodec, PixelCodec
from dpsynth.public.spool import in_parts
from dpsynth.public.wavelet import stored_codec

FORMAT = "dpsynth-geometry-1"
GEOMETRY, CALIBRATION = "geometry.safetensors", "calibration.json"
_BATCH = 500
_NUMBERS = 2**23  # of codes that are decoded at once: bounds memory
Rows = TypeVar("Rows", NDArray[np.uint8], Tensor)


class Codec(Protocol):
    """Raw codes of images and back; `Representation` centres and scales them.

    `elementwise`: whether it computes by NumPy's elementwise operations alone, on one thread, so
    that several threads may encode at once.
    """

    elementwise: ClassVar[bool]

    def encode_rows(self, images: NDArray[np.uint8]) -> NDArray[np.float64]: ...  # noqa: D102
    def encode_many(self, images: NDArray[np.uint8]) -> Tensor: ...  # noqa: D102
    def decode(self, codes: Tensor) -> Tensor: ...  # noqa: D102
    def arrays(self) -> dict[str, NDArray[np.generic]]: ...  # noqa: D102


@dataclass(frozen=True, eq=False)
class AutoencoderCodec:
    """The convolutional autoencoder in eval mode."""

    model: ConvAutoencoder
    elementwise: ClassVar[bool] = False

    def encode_rows(self, images: NDArray[np.uint8]) -> NDArray[np.float64]:
        """Codes (n, d) of images (n, H, W, C): a forward pass for each record and no other.

        One thread and a batch of one always: how a sum is split never depends on other records
        or on machine settings. The input is copied into memory that torch aligned, for kernels
        may choose the order of their sums by alignment.
        """
        codes = np.empty((len(images), self.model.code))
        with one_thread(), torch.inference_mode():
            for code, image in zip(codes, images, strict=True):
                batch = pixels(torch.from_numpy(np.array(image, order="C"))[None])
                code[...] = self.model.encode(batch)[0].double().numpy()
        return codes

    def encode_many(self, images: NDArray[np.uint8]) -> Tensor:
        """Codes (n, d) of public images (n, H, W, C), in batches."""
        with torch.no_grad():
            parts = [self.model.encode(pixels(torch.from_numpy(part))) for part in _parts(images)]
        return torch.cat(parts)

    def decode(self, codes: Tensor) -> Tensor:
        """Pixels (n, H, W, C) in [0, 1] of codes (n, d)."""
        with torch.no_grad():
            parts = [self.model.decode(part).sigmoid() for part in _parts(codes.float())]
        return torch.cat(parts).permute(0, 2, 3, 1)

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """What `geometry.safetensors` keeps of it."""
        state = self.model.state_dict()
        return {f"net.{name}": value.contiguous().numpy() for name, value in state.items()}


@dataclass(frozen=True, eq=False)
class Representation:
    """A codec with its public centre, scale and clip radius R (all in the same code space)."""

    codec: Codec
    shape: tuple[int, int, int]
    mean: NDArray[np.float64]
    scale: float
    radius: float

    @property
    def dim(self) -> int:
        """Numbers in a code, d."""
        return len(self.mean)

    @property
    def elementwise(self) -> bool:
        """Whether several threads may encode at once, see `Codec`."""
        return self.codec.elementwise

    def encode_exact(self, image: NDArray[np.uint8]) -> NDArray[np.float64]:
        """Code (d,) of one record (H, W, C), the same bits whatever was encoded before or beside.

        Not clipped.
        """
        code: NDArray[np.float64] = self.encode_exact_many(image[None])[0]
        return code

    def encode_exact_many(self, images: NDArray[np.uint8]) -> NDArray[np.float64]:
        """Codes (n, d) of records (n, H, W, C), each the same bits as by `encode_exact`."""
        self._check(images.shape[1:])
        codes = self.codec.encode_rows(images)
        codes -= self.mean
        codes /= self.scale
        return codes

    def encode(self, images: NDArray[np.uint8]) -> Tensor:
        """Codes (n, d) float32 of public or synthetic images (n, H, W, C), in batches."""
        self._check(images.shape[1:])
        raw = self.codec.encode_many(images).double()
        return ((raw - torch.from_numpy(self.mean)) / self.scale).float()

    def decode(self, codes: Tensor) -> NDArray[np.uint8]:
        """Images (n, H, W, C) of codes (n, d), rounded and clipped to bytes."""
        size = max(1, _NUMBERS // max(1, self.dim))
        parts = [codes[at : at + size] for at in range(0, max(1, len(codes)), size)]
        return np.concatenate([as_bytes(self.decode_pixels(part)) for part in parts])

    def decode_pixels(self, codes: Tensor) -> Tensor:
        """Images (n, C, H, W) in [0, 1] of codes (n, d), in the codec's own precision."""
        if codes.ndim != 2 or codes.shape[1] != self.dim:
            raise UsageError(f"decode got {tuple(codes.shape)}, expected codes (n, {self.dim})")
        raw = codes.detach().cpu().double() * self.scale + torch.from_numpy(self.mean)
        return self.codec.decode(raw).clamp(0.0, 1.0).permute(0, 3, 1, 2)

    def _check(self, shape: tuple[int, ...]) -> None:
        if shape != self.shape:
            raise UsageError(f"an image of shape {shape} was given, expected {self.shape}")


def standardised(
    codec: Codec, images: NDArray[np.uint8], radius: float = 1.0, *, scaled: bool = True
) -> Representation:
    """The representation whose centre and scale are those of public `images` (n, H, W, C).

    scaled: False leaves the scale 1, for codes that a model knows in their own units. One pass.
    Sums are taken about the first part's mean, so that no difference of large numbers loses digits.
    """
    shift: Tensor | None = None
    first, second, size = torch.zeros(()), torch.zeros(()), 0
    for part in in_parts(images):
        raw = codec.encode_many(part).double()
        shift = raw.mean(0) if shift is None else shift
        first, second = first + (raw - shift).sum(0), second + (raw - shift).square().sum()
        size += len(part)
    if shift is None:
        raise UsageError("there are no public images to centre the code space by")
    moved = first / size
    mean_square = second / (size * len(moved)) - moved.square().mean()
    scale = float(mean_square.clamp_min(0.0).sqrt()) if scaled else 1.0
    return Representation(codec, images.shape[1:], (shift + moved).numpy(), scale, radius)


def save_geometry(path: Path, representation: Representation, metadata: dict[str, str]) -> None:
    """Write codec, centre and scale as safetensors, atomically. The radius goes elsewhere."""
    arrays = {
        **representation.codec.arrays(),
        "mean": representation.mean,
        "scale": np.array([representation.scale]),
    }
    save_tensors(path, arrays, {**metadata, "format": FORMAT, "room": "public"})


def load_geometry(path: Path, plan: Plan) -> tuple[Representation, dict[str, str]]:
    """Read a geometry file (its radius is still 1), and its metadata.

    Raises:
        MissingError: no such file.
        UsageError: damaged, or made for another plan.
        PlanError: the weights of a frozen prior, whose VAE codes images, changed since.
    """
    arrays, metadata = load_tensors(path)
    if plan.frozen is not None:
        require_weights(open_checkpoint(plan), metadata.get("weights_sha256"))
    image = plan.private.image
    shape = (image.height, image.width, image.channels)
    try:
        if metadata.get("format") != FORMAT:
            raise ValueError("format")
        if metadata.get("kind", plan.representation.kind) != plan.representation.kind:
            raise ValueError("kind")
        codec = _codec(arrays, plan, image)
        mean = np.asarray(arrays["mean"], dtype=np.float64)
        scale = float(arrays["scale"][0])
        if mean.shape != (plan.representation.code,):
            raise ValueError("dim")
    except (KeyError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"{path.name} does not fit the plan's representation",
            hint="start a new run folder with --run, then: dpsynth pretrain RUN",
        ) from error
    return Representation(codec, shape, mean, scale, 1.0), metadata


def load_representation(run: RunDir, plan: Plan) -> Representation:
    """The run's representation, its radius R from the calibration.

    Raises:
        MissingError: `dpsynth pretrain` has not finished.
        UsageError: the geometry is not the one that the calibration names, or the plan's
            representation is tokens, which are no numbers.
        ReplayError: the calibration is not the one that the run's charges name.
    """
    if plan.representation.kind == "tokens":
        raise UsageError(
            f"the plan {plan.name} learns tokens: its images have no codes of numbers",
            hint="ask for this of a plan with another representation.kind, such as wavelet",
        )
    path, calibration = run.public / GEOMETRY, run.public / CALIBRATION
    if not path.exists() or not calibration.exists():
        raise MissingError(
            "the public representation is not there yet",
            hint=typed("dpsynth", "pretrain", run.root),
        )
    require_calibration(run)
    facts = read_json(calibration)
    if sha256_file(path) != facts.get("geometry_sha256"):
        raise UsageError(
            f"{GEOMETRY} is not the file that {CALIBRATION} names",
            hint=typed("dpsynth", "pretrain", run.root),
        )
    representation, _ = load_geometry(path, plan)
    return replace(representation, radius=float(facts["radius"]))


def _codec(arrays: dict[str, NDArray[np.generic]], plan: Plan, image: ImageShape) -> Codec:
    if plan.representation.kind == "pixels":
        return PixelCodec((image.height, image.width, image.channels))
    if plan.representation.kind == "latent":
        return LatentCodec.of(plan)
    if plan.representation.kind == "wavelet":
        return stored_codec(arrays["rows"], arrays["columns"], plan.representation, image)
    if plan.representation.kind == "pca":
        basis = np.asarray(arrays["basis"], dtype=np.float64)
        centre = np.asarray(arrays["centre"], dtype=np.float64)
        if basis.shape != (plan.representation.code, image.height * image.width * image.channels):
            raise ValueError("basis")
        return PcaCodec(basis, centre, (image.height, image.width, image.channels))
    model = build_autoencoder(plan.representation, image)
    # load_state_dict copies into memory that torch aligned.
    model.load_state_dict(
        {
            name.removeprefix("net."): torch.from_numpy(np.array(value))
            for name, value in arrays.items()
            if name.startswith("net.")
        }
    )
    return AutoencoderCodec(model.eval().requires_grad_(False))


def _parts(rows: Rows) -> list[Rows]:
    """Slices of at most `_BATCH` rows of an array or a tensor."""
    return [rows[start : start + _BATCH] for start in range(0, len(rows), _BATCH)]
