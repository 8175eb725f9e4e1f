"""Features in a sealed folder: written once, and read by every run on the same target, data and layers.

A shard holds rows one behind the other, without their padding: for each token the auxiliary hidden states and, last,
the hidden state after the final norm. A row is found by a hash of its tokens, positions and documents, and has a
checksum. `manifest.json` says what the features are of, and comes last: a folder without one is not whole.

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
from heads.target.frozen import Features, FrozenTarget
from train.data.packing import Mixture
from train.features.base import FeatureSource
from train.features.settings import CacheFeatures

FORMAT = 1
DTYPES = {"fp8": torch.float8_e4m3fn, "bfloat16": torch.bfloat16, "float32": torch.float32}
REMEDY = "fill another folder by python scripts/cache_features.py RECIPE"


def describe(
    target: FrozenTarget, aux_layer_ids: Sequence[int], dtype: str, precision: str, mixture: Mixture
) -> dict[str, Any]:
    """Everything that the features of a folder depend on."""
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
    """Refuse features that are not of what is `wanted`, naming the first difference."""
    for name, value in wanted.items():
        if about.get(name) != value:
            raise UserError(
                f"features.folder {folder}: {name}: holds {about.get(name)!r}, expected {value!r}; {REMEDY}"
            )


def encode(streams: Tensor, dtype: str) -> tuple[Tensor, Tensor | None]:
    """Turn streams (N, S, D) into what is stored: values of `dtype` and, for fp8, scales (N, S)."""
    if dtype != "fp8":
        return streams.to(DTYPES[dtype]), None
    most = torch.finfo(torch.float8_e4m3fn).max
    scales = streams.float().abs().amax(-1).clamp_min(torch.finfo(torch.float32).tiny * most) / most
    return (streams.float() / scales[..., None]).clamp(-most, most).to(torch.float8_e4m3fn), scales


def decode(values: Tensor, scales: Tensor | None) -> Tensor:
    """Turn stored values back into streams (N, S, D)."""
    return values if scales is None else values.float() * scales[..., None]


def row_key(tokens: Tensor, positions: Tensor, documents: Tensor) -> bytes:
    """A hash of one row (T,) on the CPU without its padding, which features are a function of."""
    kept = documents >= 0
    return hashlib.sha256(torch.stack([tokens[kept], positions[kept], documents[kept]]).numpy().tobytes()).digest()


def checksum(values: Tensor, scales: Tensor | None) -> int:
    """A checksum of a row's stored tensors."""
    found = zlib.crc32(values.contiguous().view(torch.uint8).numpy().data)
    return found if scales is None else zlib.crc32(scales.contiguous().numpy().data, found)


class Shard:
    """One file of rows."""

    def __init__(self, path: Path) -> None:
        """UserError where the file is not whole."""
        self.path = path
        try:
            opened: Any = safe_open
            self.file = opened(path, "pt")
            digests, ends, sums = (self.file.get_tensor(name) for name in ("digests", "ends", "checksums"))
        except (OSError, SafetensorError) as error:
            raise self.fault(first_line(error)) from error
        self.has_scales = "scales" in self.file.keys()  # noqa: SIM118 - it is no mapping
        begins = [0, *ends.tolist()]
        self.rows: dict[bytes, tuple[int, int, int]] = {
            digest.numpy().tobytes(): (begin, end, total)
            for digest, begin, end, total in zip(digests, begins, ends.tolist(), sums.tolist(), strict=False)
        }
        """The key of each row -> its first token, the one behind its last, and its checksum."""

    def read(self, key: bytes) -> tuple[Tensor, Tensor | None]:
        """The stored tensors of a row. UserError if they are not what was written."""
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
        """The error for a damaged file."""
        return UserError(
            f"{self.path}: is damaged ({why}); delete it and run "
            "python scripts/cache_features.py RECIPE, which makes it again"
        )


class Manifest(BaseModel):
    """The record of a sealed folder."""

    about: dict[str, Any]
    shards: dict[str, int]


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a sealed folder; None where there is none. UserError if it cannot be read."""
    path = folder / "manifest.json"
    if not path.is_file():
        return None
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({first_line(error)}); {REMEDY}") from None


def seal(folder: Path, about: dict[str, Any]) -> None:
    """Write the manifest of a folder whose shards are all there."""
    shards = {path.name: path.stat().st_size for path in sorted(folder.glob("rows-*.safetensors"))}
    write_json(folder / "manifest.json", {"about": about, "shards": shards})


class CachedFeatures(FeatureSource):
    """Features from a sealed folder."""

    def __init__(self, target: FrozenTarget, settings: CacheFeatures, precision: str, **own: Any) -> None:
        """`precision`: of this run's products, in Accelerate's words."""
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
        """Refuse a folder of other rows or layers."""
        wanted = describe(self.target, aux_layer_ids, self.dtype, self.precision, mixture)
        check_same(self.folder, self.about, wanted)

    def fetch(self, tokens: Tensor, positions: Tensor, documents: Tensor, aux_layer_ids: Sequence[int]) -> Features:
        """Features of packed rows, (B, T) each, on the target's device; zeros in the padding."""
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
