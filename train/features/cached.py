"""A cache of features: a folder, written once and read by all runs with the same target and data, whose heads read
layers that it holds.

The rows of the data are divided into shards, in order. A shard is a safetensors file, which is complete or absent and
is mapped into memory. It has the rows' tokens one after the other, without padding: for each token the auxiliary
hidden states and, last, the hidden state after the final norm. A row is found by a hash of its tokens, positions and
documents.

Letters: N tokens, S streams (the auxiliary layers and the last hidden state), D hidden.
"""

import hashlib
import json
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from eval.core.progress import Progress
from heads.core.contract import Rows
from heads.core.errors import UserError, first_line
from heads.core.files import check_folder, write_bytes
from heads.parts.initial_weights import probe_tokens, probed_rows
from heads.targets.frozen_target import Features, FrozenTarget
from heads.targets.identity import changes
from train.core.processes import on_main
from train.data.packing import Mixture, Pool, empty_rows, text_rows
from train.features.feature_settings import CacheFeatures
from train.features.feature_source import FeatureSource

FORMAT = 2
DTYPES = {"fp8": torch.float8_e4m3fn, "bfloat16": torch.bfloat16, "float32": torch.float32}
SHARD_BYTES = 2**28
"""Approximate size of a shard."""
COMMAND = "python scripts/cache_features.py RECIPE"


def describe(
    target: FrozenTarget, aux_layer_ids: Sequence[int], dtype: str, precision: str, mixture: Mixture
) -> dict[str, object]:
    return {
        "format": FORMAT,
        "target": target.fingerprint,
        "settings": target.settings,
        "aux_layer_ids": list(aux_layer_ids),
        "dtype": dtype,
        "precision": precision,
        "row_length": mixture.row_length,
        "data": mixture.rows_digest(),
    }


def check_holds(folder: Path, about: dict[str, Any], wanted: dict[str, Any], *, exact: bool = False) -> None:
    """Raise UserError with the first difference if features described by `about` are not the `wanted` ones. They may
    have more layers, unless `exact`."""
    for name, value in wanted.items():
        present = about.get(name, value if name == "settings" else None)  # unknown to earlier versions
        has_more = name == "aux_layer_ids" and not exact and set(value) <= set(present or ())
        if present != value and not has_more:
            what = f"{name}: holds {present!r}, expected {value!r}"
            if name == "settings":
                what = f"of another target: {'; '.join(changes({name: present}, {name: value}))}"
            raise UserError(f"features.folder {folder}: {what}; fill another folder with {COMMAND}")


def encode(streams: Tensor, dtype: str) -> dict[str, Tensor]:
    """Convert streams (N, S, D) into the stored form: `values` of `dtype` and, for fp8, `scales` (N, S)."""
    if dtype != "fp8":
        return {"values": streams.to(DTYPES[dtype])}
    limit = torch.finfo(torch.float8_e4m3fn).max
    scales = streams.float().abs().amax(-1).clamp_min(torch.finfo(torch.float32).tiny * limit) / limit
    values = (streams.float() / scales[..., None]).clamp(-limit, limit).to(torch.float8_e4m3fn)
    return {"values": values, "scales": scales}


def decode(values: Tensor, scales: Tensor | None = None) -> Tensor:
    """Convert stored values back into streams (N, S, D)."""
    return values if scales is None else values.float() * scales[..., None]


def row_key(tokens: Tensor, positions: Tensor, documents: Tensor) -> bytes:
    """Return a hash of one row (T,) on the CPU, without its padding. The row's features are a function of its input."""
    inside = documents >= 0
    parts = torch.stack([tokens[inside], positions[inside], documents[inside]])
    return hashlib.sha256(parts.numpy().tobytes()).digest()


class Shard:
    def __init__(self, path: Path) -> None:
        """Open a file. UserError if it is damaged."""
        self.path = path
        try:
            opened: Any = safe_open
            self.file = opened(path, "pt")
            self.about: dict[str, Any] = json.loads(self.file.metadata()["about"])
            self.total = int(self.file.metadata()["total"])
            """Number of shards in the folder, of which this is one."""
            keys = self.file.get_tensor("keys")
            ends = self.file.get_tensor("ends").tolist()
        except (OSError, SafetensorError, TypeError, LookupError, ValueError) as error:
            raise UserError(f"{path}: is damaged ({first_line(error)}); delete it and run {COMMAND}") from error
        self.rows: dict[bytes, tuple[int, int]] = {
            key.numpy().tobytes(): span for key, span in zip(keys, pairwise([0, *ends]), strict=True)
        }
        """The key of each row -> the index of its first token, and the index after its last."""

    def read(self, key: bytes) -> Tensor:
        """Return the streams (N, S, D) of a row."""
        begin, end = self.rows[key]
        names = ("values", "scales") if self.about["dtype"] == "fp8" else ("values",)
        return decode(*(self.file.get_slice(name)[begin:end] for name in names))


def open_shards(folder: Path) -> list[Shard]:
    """Return the files of a folder. UserError if they are not all of the same target, data and layers."""
    shards = [Shard(path) for path in sorted(folder.glob("rows-*.safetensors"))]
    for shard in shards[1:]:
        check_holds(folder, shard.about, shards[0].about, exact=True)
    return shards


class CachedFeatures(FeatureSource):
    def __init__(self, target: FrozenTarget, settings: CacheFeatures, precision: str, **own: Any) -> None:
        """`precision`: the precision of this run's matrix products, in Accelerate's terms."""
        super().__init__(target, **own)
        self.folder = Path(settings.folder)
        self.dtype = settings.dtype
        self.precision = precision
        shards = open_shards(self.folder)
        if not shards or len(shards) < shards[0].total:
            raise UserError(f"features.folder {self.folder}: is not filled; run {COMMAND} first")
        self.about = shards[0].about
        wanted = {"target": target.fingerprint, "settings": target.settings}
        wanted |= {"dtype": self.dtype, "precision": precision}
        check_holds(self.folder, self.about, wanted)
        self.shards = {key: shard for shard in shards for key in shard.rows}
        """The key of each row -> the shard that holds it."""
        target.compute_by(self.fetch)

    def check(self, mixture: Mixture, aux_layer_ids: Sequence[int]) -> None:
        """Raise UserError if the folder has features of other rows or layers."""
        wanted = describe(self.target, aux_layer_ids, self.dtype, self.precision, mixture)
        check_holds(self.folder, self.about, wanted)

    def fetch(self, tokens: Tensor, positions: Tensor, documents: Tensor, aux_layer_ids: Sequence[int]) -> Features:
        """Return features of packed rows, (B, T) each, on the target's device. They are zero in the padding."""
        check_holds(self.folder, self.about, {"aux_layer_ids": list(aux_layer_ids)})
        target = self.target
        streams = [*map(self.about["aux_layer_ids"].index, aux_layer_ids), -1]
        dtype = target.dtype if self.dtype == "fp8" else DTYPES[self.dtype]
        out = torch.zeros(*tokens.shape, len(streams), target.hidden_size, dtype=dtype)
        for row, parts in enumerate(zip(tokens.cpu(), positions.cpu(), documents.cpu(), strict=True)):
            key = row_key(*parts)
            if key not in self.shards:
                raise UserError(f"features.folder {self.folder}: lacks a row; fill another folder with {COMMAND}")
            out[row, parts[2] >= 0] = self.shards[key].read(key)[:, streams].to(dtype)
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
    """Write the features of all rows of `mixture`; each process computes its share of the shards. Shards that an
    interrupted run has written are kept. UserError, before anything is computed, if the disk has too little space."""
    folder = Path(settings.folder)
    target = source.target
    dtype = settings.dtype
    about = describe(target, aux_layer_ids, dtype, accelerator.mixed_precision, mixture)
    streams = len(aux_layer_ids) + 1
    token_bytes = streams * (target.hidden_size * DTYPES[dtype].itemsize + (4 if dtype == "fp8" else 0))
    places = [(pool, index) for pool in mixture.pools for index in range(len(pool))]
    size = max(1, SHARD_BYTES // (mixture.row_length * token_bytes))
    shards = [places[begin : begin + size] for begin in range(0, len(places), size)]
    # The last shard has rows of random tokens, with which a head's initial weights are scaled.
    total = len(shards) + 1

    def find_missing() -> list[int]:
        """Return the numbers of the shards that are not in the folder."""
        check_folder(folder, "features.folder")
        folder.mkdir(parents=True, exist_ok=True)
        present = open_shards(folder)
        is_filled = bool(present) and len(present) == present[0].total
        if present:
            check_holds(folder, present[0].about, about, exact=not is_filled)
        if is_filled:
            say(f"features.folder {folder}: filled already")
            return []
        whole = sum(int(pool.pieces[:, 1].sum()) for pool in mixture.pools) * token_bytes
        written = sum(shard.path.stat().st_size for shard in present)
        say(f"features.folder {folder}: {whole / 1e9:.3g} GB, of which {written / 1e9:.3g} GB are there")
        free = shutil.disk_usage(folder).free
        if whole - written > free:
            raise UserError(
                f"features.folder {folder}: needs {(whole - written) / 1e9:.3g} GB, its disk has {free / 1e9:.3g} GB; "
                "free some space, name another folder, or set features.dtype=fp8"
            )
        return [number for number in range(total) if not (folder / name_of(number)).is_file()]

    def write(number: int, batches: Iterator[Rows]) -> None:
        keys: list[bytes] = []
        parts: list[dict[str, Tensor]] = []
        for rows in look_ahead(batches, source):
            tokens, positions, documents = (
                part.to(target.device) for part in (rows.tokens, rows.positions, rows.documents)
            )
            with accelerator.autocast():  # like in training
                features = target.packed_features(tokens, positions, documents, aux_layer_ids)
            both = torch.cat([features.aux_hidden_states, features.hidden], -1).unflatten(-1, (streams, -1)).cpu()
            for row, inside in enumerate(rows.documents >= 0):
                keys.append(row_key(rows.tokens[row], rows.positions[row], rows.documents[row]))
                parts.append(encode(both[row, inside], dtype))
        tensors = {}
        for name in parts[0]:
            tensors[name] = torch.cat([part[name] for part in parts])
        tensors["keys"] = torch.frombuffer(bytearray(b"".join(keys)), dtype=torch.uint8).view(-1, 32)
        tensors["ends"] = torch.tensor([len(part["values"]) for part in parts]).cumsum(0)
        metadata = {"about": json.dumps(about), "total": str(total)}
        write_bytes(folder / name_of(number), save(tensors, metadata))

    if not (missing := on_main(accelerator, find_missing)):
        return
    own = missing[accelerator.process_index :: accelerator.num_processes]
    with Progress("features.folder: shard", len(own)) as progress:
        for number in own:
            if number < len(shards):
                write(number, batches_of(shards[number], batch_size))
            else:
                counts = mixture.label_counts(target.vocab_size)
                sizes = {probed_rows(target.hidden_size, closely) for closely in (False, True)}
                write(number, (text_rows(probe_tokens(counts, size).tolist()) for size in sizes))
            progress.advance()
    accelerator.wait_for_everyone()
    say(f"features.folder {folder}: filled")


def name_of(number: int) -> str:
    return f"rows-{number:05}.safetensors"


def batches_of(places: Sequence[tuple[Pool, int]], batch_size: int) -> Iterator[Rows]:
    """Yield rows of pools, `batch_size` at a time."""
    for begin in range(0, len(places), batch_size):
        batch = places[begin : begin + batch_size]
        rows = empty_rows(len(batch), batch[0][0].row_length)
        for row, (pool, index) in enumerate(batch):
            pool.fill(index, row, rows)
        yield rows


def look_ahead(batches: Iterator[Rows], source: FeatureSource) -> Iterator[Rows]:
    """Yield the batches. Each is announced to the source `steps_ahead` batches before it is yielded."""
    ahead: deque[Rows] = deque()
    for rows in batches:
        source.expect(rows)
        ahead.append(rows)
        if len(ahead) > source.steps_ahead:
            yield ahead.popleft()
    yield from ahead
