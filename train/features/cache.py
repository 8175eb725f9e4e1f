"""A cache of features: a sealed folder, written once and read by all runs with the same target, data and layers.

A shard holds concatenated rows without their padding: for each token the auxiliary hidden states and, last, the hidden
state after the final norm. The key of a row is a hash of its tokens, positions and documents. Each row has a checksum.
`manifest.json` describes the features and is written last, so a folder without it is incomplete.

Letters: N tokens, S streams (the auxiliary layers and the last hidden state), D hidden.
"""

import hashlib
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from safetensors import SafetensorError, safe_open
from torch import Tensor

from heads.errors import UserError, first_line
from heads.files import write_json
from heads.target.model import Features, FrozenTarget
from train.data.packing import Mixture
from train.features.base import FeatureSource
from train.features.settings import CacheFeatures

FORMAT = 1
DTYPES = {"fp8": torch.float8_e4m3fn, "bfloat16": torch.bfloat16, "float32": torch.float32}
REMEDY = "fill another folder by python scripts/cache_features.py RECIPE"


def describe(
    target: FrozenTarget, aux_layer_ids: Sequence[int], dtype: str, precision: str, mixture: Mixture
) -> dict[str, Any]:
    """Return everything on which the features of a folder depend."""
    return {
        "format": FORMAT,
        "target": target.fingerprint,
        "aux_layer_ids": list(aux_layer_ids),
        "dtype": dtype,
        "precision": precision,
        "row_length": mixture.row_length,
        "data": mixture.rows_digest(),
    }


def check_same(folder: Path, about: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raise UserError with the first difference if the features described by `about` are not the `wanted` ones."""
    for name, value in wanted.items():
        if about.get(name) != value:
            raise UserError(
                f"features.folder {folder}: {name}: holds {about.get(name)!r}, expected {value!r}; {REMEDY}"
            )


def encode(streams: Tensor, dtype: str) -> tuple[Tensor, Tensor | None]:
    """Convert streams (N, S, D) into the stored form: values of `dtype` and, for fp8, scales (N, S)."""
    if dtype != "fp8":
        return streams.to(DTYPES[dtype]), None
    most = torch.finfo(torch.float8_e4m3fn).max
    scales = streams.float().abs().amax(-1).clamp_min(torch.finfo(torch.float32).tiny * most) / most
    return (streams.float() / scales[..., None]).clamp(-most, most).to(torch.float8_e4m3fn), scales


def stored_bytes(tokens: int, streams: int, width: int, dtype: str) -> int:
    """Return the bytes of the stored features of `tokens` tokens, without hashes and headers."""
    return tokens * streams * (width * DTYPES[dtype].itemsize + (4 if dtype == "fp8" else 0))


def decode(values: Tensor, scales: Tensor | None) -> Tensor:
    """Convert stored values back into streams (N, S, D)."""
    return values if scales is None else values.float() * scales[..., None]


def row_key(tokens: Tensor, positions: Tensor, documents: Tensor) -> bytes:
    """Return a hash of one row (T,) on the CPU, without its padding. The row's features are a function of its input."""
    kept = documents >= 0
    return hashlib.sha256(torch.stack([tokens[kept], positions[kept], documents[kept]]).numpy().tobytes()).digest()


def checksum(values: Tensor, scales: Tensor | None) -> int:
    """Return a checksum of a row's stored tensors."""
    found = zlib.crc32(values.contiguous().view(torch.uint8).numpy().data)
    return found if scales is None else zlib.crc32(scales.contiguous().numpy().data, found)


class Shard:
    """One file of rows."""

    def __init__(self, path: Path) -> None:
        """Open a file. UserError if it is damaged."""
        self.path = path
        try:
            opened: Any = safe_open
            self.file = opened(path, "pt")
            digests, ends, sums = (self.file.get_tensor(name) for name in ("digests", "ends", "checksums"))
        except (OSError, SafetensorError) as error:
            raise self.fault(first_line(error)) from error
        self.has_scales = "scales" in self.file.keys()  # noqa: SIM118 - it is not a mapping
        begins = [0, *ends.tolist()]
        self.rows: dict[bytes, tuple[int, int, int]] = {
            digest.numpy().tobytes(): (begin, end, total)
            for digest, begin, end, total in zip(digests, begins, ends.tolist(), sums.tolist(), strict=False)
        }
        """The key of each row -> the index of its first token, the index after its last, and its checksum."""

    def read(self, key: bytes) -> tuple[Tensor, Tensor | None]:
        """Return the stored tensors of a row. UserError if they cannot be read or do not match their checksum."""
        begin, end, total = self.rows[key]
        names = ("values", "scales") if self.has_scales else ("values",)
        try:
            found = [self.file.get_slice(name)[begin:end] for name in names]
        except SafetensorError as error:
            raise self.fault(first_line(error)) from error
        values, scales = found[0], found[1] if self.has_scales else None
        if checksum(values, scales) != total:
            raise self.fault("a row is not what was written")
        return values, scales

    def fault(self, why: str) -> UserError:
        """Return the error for a damaged file."""
        return UserError(
            f"{self.path}: is damaged ({why}); delete it and run "
            "python scripts/cache_features.py RECIPE, which makes it again"
        )


class Manifest(BaseModel):
    """The record of a sealed folder."""

    about: dict[str, Any]
    shards: dict[str, int]


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a folder, or None if there is none. UserError if it cannot be read."""
    path = folder / "manifest.json"
    if not path.is_file():
        return None
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({first_line(error)}); {REMEDY}") from None


def seal(folder: Path, about: dict[str, Any]) -> None:
    """Write the manifest of a folder whose shards are complete."""
    shards = {path.name: path.stat().st_size for path in sorted(folder.glob("rows-*.safetensors"))}
    write_json(folder / "manifest.json", {"about": about, "shards": shards})


class CachedFeatures(FeatureSource):
    """Features from a sealed folder."""

    def __init__(self, target: FrozenTarget, settings: CacheFeatures, precision: str, **own: Any) -> None:
        """`precision`: the precision of this run's matrix products, in Accelerate's terms."""
        super().__init__(target, **own)
        self.folder, self.dtype, self.precision = Path(settings.folder), settings.dtype, precision
        manifest = read_manifest(self.folder)
        if manifest is None:
            raise UserError(
                f"features.folder {self.folder}: holds no manifest.json, so it is not filled; run "
                "python scripts/cache_features.py RECIPE first"
            )
        self.about = manifest.about
        check_same(self.folder, self.about, {"target": target.fingerprint, "dtype": self.dtype, "precision": precision})
        self.shards: dict[bytes, Shard] = {}
        """The key of each row -> the shard that holds it."""
        for name, size in manifest.shards.items():
            shard = Shard(self.folder / name)
            if shard.path.stat().st_size != size:
                raise shard.fault(f"expected {size} bytes")
            self.shards |= dict.fromkeys(shard.rows, shard)
        target.remote = self.fetch

    def check(self, mixture: Mixture, aux_layer_ids: Sequence[int]) -> None:
        """Raise UserError if the folder has features of other rows or layers."""
        wanted = describe(self.target, aux_layer_ids, self.dtype, self.precision, mixture)
        check_same(self.folder, self.about, wanted)

    def fetch(self, tokens: Tensor, positions: Tensor, documents: Tensor, aux_layer_ids: Sequence[int]) -> Features:
        """Return features of packed rows, (B, T) each, on the target's device. They are zero in the padding."""
        check_same(self.folder, self.about, {"aux_layer_ids": list(aux_layer_ids)})
        target, streams = self.target, len(aux_layer_ids) + 1
        dtype = target.dtype if self.dtype == "fp8" else DTYPES[self.dtype]
        out = torch.zeros(*tokens.shape, streams, target.hidden_size, dtype=dtype)
        for row, parts in enumerate(zip(tokens.cpu(), positions.cpu(), documents.cpu(), strict=True)):
            key = row_key(*parts)
            if key not in self.shards:
                raise UserError(f"features.folder {self.folder}: lacks a row that is asked for; {REMEDY}")
            out[row, parts[2] >= 0] = decode(*self.shards[key].read(key)).to(dtype)
        moved = out.to(target.device, non_blocking=True)
        return Features(moved[:, :, :-1].flatten(2), moved[:, :, -1])
