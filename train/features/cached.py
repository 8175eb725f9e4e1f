"""A cache of features: a sealed folder, written once and read by all runs with the same target and data, whose heads
read layers that it holds.

A shard holds concatenated rows without their padding: for each token the auxiliary hidden states and, last, the hidden
state after the final norm. The key of a row is a hash of its tokens, positions and documents. Each row has a checksum.
`manifest.json` describes the features and is written last, so a folder without it is incomplete.

Letters: N tokens, S streams (the auxiliary layers and the last hidden state), D hidden.
"""

import hashlib
import json
import shutil
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from pydantic import BaseModel
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from heads.core.contract import Rows
from heads.core.errors import UserError, first_line
from heads.core.files import check_folder, write_bytes, write_json
from heads.methods.start import probe_tokens, probed_rows
from heads.targets.model import Features, FrozenTarget
from train.core.processes import on_main
from train.data.packing import Mixture, text_rows
from train.features.settings import CacheFeatures
from train.features.source import FeatureSource

FORMAT = 1
DTYPES = {"fp8": torch.float8_e4m3fn, "bfloat16": torch.bfloat16, "float32": torch.float32}
SHARD_BYTES = 2**28
"""Minimum size of a file, except the last one of each process."""
REMEDY = "fill another folder by python scripts/cache_features.py RECIPE"


def describe(
    target: FrozenTarget, aux_layer_ids: Sequence[int], dtype: str, precision: str, mixture: Mixture
) -> dict[str, Any]:
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


def check_holds(folder: Path, about: dict[str, Any], wanted: dict[str, Any]) -> None:
    """As `check_same`, but the features may have more layers than are wanted."""
    held = about.get("aux_layer_ids", [])
    check_same(folder, about, wanted | ({"aux_layer_ids": held} if set(wanted["aux_layer_ids"]) <= set(held) else {}))


def encode(streams: Tensor, dtype: str) -> tuple[Tensor, Tensor | None]:
    """Convert streams (N, S, D) into the stored form: values of `dtype` and, for fp8, scales (N, S)."""
    if dtype != "fp8":
        return streams.to(DTYPES[dtype]), None
    most = torch.finfo(torch.float8_e4m3fn).max
    scales = streams.float().abs().amax(-1).clamp_min(torch.finfo(torch.float32).tiny * most) / most
    return (streams.float() / scales[..., None]).clamp(-most, most).to(torch.float8_e4m3fn), scales


def decode(values: Tensor, scales: Tensor | None) -> Tensor:
    """Convert stored values back into streams (N, S, D)."""
    return values if scales is None else values.float() * scales[..., None]


def row_key(tokens: Tensor, positions: Tensor, documents: Tensor) -> bytes:
    """Return a hash of one row (T,) on the CPU, without its padding. The row's features are a function of its input."""
    kept = documents >= 0
    return hashlib.sha256(torch.stack([tokens[kept], positions[kept], documents[kept]]).numpy().tobytes()).digest()


def checksum(values: Tensor, scales: Tensor | None) -> int:
    found = zlib.crc32(values.contiguous().view(torch.uint8).numpy().data)
    return found if scales is None else zlib.crc32(scales.contiguous().numpy().data, found)


class Shard:
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
        return UserError(
            f"{self.path}: is damaged ({why}); delete it and run "
            "python scripts/cache_features.py RECIPE, which makes it again"
        )


class Manifest(BaseModel):
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
    shards = {path.name: path.stat().st_size for path in sorted(folder.glob("rows-*.safetensors"))}
    write_json(folder / "manifest.json", {"about": about, "shards": shards})


class CachedFeatures(FeatureSource):
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
        check_holds(self.folder, self.about, wanted)

    def fetch(self, tokens: Tensor, positions: Tensor, documents: Tensor, aux_layer_ids: Sequence[int]) -> Features:
        """Return features of packed rows, (B, T) each, on the target's device. They are zero in the padding."""
        check_holds(self.folder, self.about, {"aux_layer_ids": list(aux_layer_ids)})
        target, streams = self.target, [*map(self.about["aux_layer_ids"].index, aux_layer_ids), -1]
        dtype = target.dtype if self.dtype == "fp8" else DTYPES[self.dtype]
        out = torch.zeros(*tokens.shape, len(streams), target.hidden_size, dtype=dtype)
        for row, parts in enumerate(zip(tokens.cpu(), positions.cpu(), documents.cpu(), strict=True)):
            key = row_key(*parts)
            if key not in self.shards:
                raise UserError(f"features.folder {self.folder}: lacks a row that is asked for; {REMEDY}")
            out[row, parts[2] >= 0] = decode(*self.shards[key].read(key))[:, streams].to(dtype)
        moved = out.to(target.device, non_blocking=True)
        return Features(moved[:, :, :-1].flatten(2), moved[:, :, -1])


def fill_folder(
    settings: CacheFeatures,
    source: FeatureSource,
    mixture: Mixture,
    aux_layer_ids: Sequence[int],
    batch_size: int,
    accelerator: Accelerator,
    say: Callable[[str], None],
) -> None:
    """Write the features of all rows of `mixture`; each process computes its share. Rows that an interrupted run has
    written are kept. UserError, before anything is computed, if the disk has too little space."""
    folder = Path(settings.folder)
    about = describe(source.target, aux_layer_ids, settings.dtype, accelerator.mixed_precision, mixture)
    streams = len(aux_layer_ids) + 1

    def begin() -> set[bytes] | None:
        found = begin_folder(folder, about)
        if found is None:
            say(f"features.folder {folder}: filled already")
            return None
        written = sum(path.stat().st_size for path in folder.glob("rows-*.safetensors"))
        tokens = sum(int(pool.pieces[:, 1].sum()) for pool in mixture.pools)
        stream = source.target.hidden_size * DTYPES[settings.dtype].itemsize + (4 if settings.dtype == "fp8" else 0)
        size = tokens * streams * stream  # bytes, without hashes and headers
        say(f"features.folder {folder}: {size / 1e9:.3g} GB, of which {written / 1e9:.3g} GB are there")
        free = shutil.disk_usage(folder).free
        if size - written > free:
            raise UserError(
                f"features.folder {folder}: needs {(size - written) / 1e9:.3g} GB, its disk has {free / 1e9:.3g} GB; "
                "free some space, name another folder, or set features.dtype=fp8"
            )
        return found

    done = on_main(accelerator, begin)
    if done is None:
        return
    writer = ShardWriter(folder, accelerator.process_index, settings.dtype)

    def write(rows: Rows) -> None:
        device = source.target.device
        tokens, positions, documents = (part.to(device) for part in (rows.tokens, rows.positions, rows.documents))
        features = source.target.packed_features(tokens, positions, documents, aux_layer_ids)
        both = torch.cat([features.aux_hidden_states, features.hidden], -1).unflatten(-1, (streams, -1)).cpu()
        for row, kept in enumerate(rows.documents >= 0):
            writer.add(row_key(rows.tokens[row], rows.positions[row], rows.documents[row]), both[row, kept])

    own = all_rows(mixture, batch_size, accelerator, done)
    for rows in announced(own, source):
        with accelerator.autocast():  # like in training
            write(rows)
    if accelerator.is_main_process:  # rows of random tokens with which a head's initial weights are scaled
        counts = mixture.label_counts(source.target.vocab_size)
        for count in {probed_rows(source.target.hidden_size, closely) for closely in (False, True)}:
            write(text_rows(probe_tokens(counts, count).tolist()))
    writer.close()
    accelerator.wait_for_everyone()
    on_main(accelerator, lambda: seal(folder, about))
    say(f"features.folder {folder}: filled")


def begin_folder(folder: Path, about: dict[str, Any]) -> set[bytes] | None:
    """Create a folder of features if necessary, and return the keys of the rows in it, or None if it is complete.
    UserError for a folder of other features."""
    check_folder(folder, "features.folder")
    manifest, begun = read_manifest(folder), folder / "filling.json"
    if manifest is not None:
        check_holds(folder, manifest.about, about)
        if all((folder / name).is_file() for name in manifest.shards):
            return None
        check_same(folder, manifest.about, about)
        (folder / "manifest.json").unlink()
    if begun.is_file():
        check_same(folder, json.loads(begun.read_bytes()), about)
    write_json(begun, about)
    return {key for path in sorted(folder.glob("rows-*.safetensors")) for key in Shard(path).rows}


def all_rows(mixture: Mixture, batch_size: int, accelerator: Accelerator, done: set[bytes]) -> Iterator[Rows]:
    places = [(pool, index) for pool in mixture.pools for index in range(len(pool))]
    own = (pool.row(index) for pool, index in places[accelerator.process_index :: accelerator.num_processes])
    left = (rows for rows in own if row_key(rows.tokens[0], rows.positions[0], rows.documents[0]) not in done)
    while batch := list(islice(left, batch_size)):
        yield Rows(*(torch.cat(parts) for parts in zip(*(vars(rows).values() for rows in batch), strict=True)))


def announced(batches: Iterator[Rows], source: FeatureSource) -> Iterator[Rows]:
    """Yield the batches. Each is announced to the source `steps_ahead` batches before it is yielded."""
    ahead: deque[Rows] = deque()
    for rows in batches:
        source.expect(rows)
        ahead.append(rows)
        if len(ahead) > source.steps_ahead:
            yield ahead.popleft()
    yield from ahead


class ShardWriter:
    """A writer that gathers rows into files. Each file is complete or absent."""

    def __init__(self, folder: Path, process: int, dtype: str) -> None:
        self.folder, self.process, self.dtype = folder, process, dtype
        self.keys: list[bytes] = []
        self.rows: list[tuple[Tensor, Tensor | None]] = []
        self.bytes = 0

    def add(self, key: bytes, streams: Tensor) -> None:
        """Add one row's streams (N, S, D), and write a file if it is full."""
        row = encode(streams, self.dtype)
        self.keys.append(key)
        self.rows.append(row)
        self.bytes += row[0].numel() * row[0].element_size()
        if self.bytes >= SHARD_BYTES:
            self.close()

    def close(self) -> None:
        """Write the remaining rows."""
        if not self.keys:
            return
        number = 0
        while (path := self.folder / f"rows-{self.process}-{number:05}.safetensors").exists():
            number += 1
        values = [row[0] for row in self.rows]
        tensors = {
            "digests": torch.frombuffer(bytearray(b"".join(self.keys)), dtype=torch.uint8).view(-1, 32),
            "ends": torch.tensor([len(part) for part in values]).cumsum(0),
            "checksums": torch.tensor([checksum(*row) for row in self.rows]),
            "values": torch.cat(values),
        }
        if self.dtype == "fp8":
            tensors["scales"] = torch.cat([scales for _, scales in self.rows if scales is not None])
        write_bytes(path, save(tensors))
        self.keys, self.rows, self.bytes = [], [], 0
