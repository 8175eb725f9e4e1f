"""Filling of a folder with features: python scripts/cache_features.py RECIPE."""

import json
import shutil
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import save
from torch import Tensor

from heads.errors import UserError
from heads.files import check_folder, write_bytes, write_json
from heads.initial.start import probe_tokens, probed_rows
from train.data.loading import load_data
from train.data.packing import Mixture, Rows, text_rows
from train.features.base import FeatureSource
from train.features.cache import (
    Shard,
    check_same,
    checksum,
    describe,
    encode,
    read_manifest,
    row_key,
    seal,
    stored_bytes,
)
from train.features.opening import open_source
from train.features.settings import CacheFeatures
from train.head_settings import make_head
from train.launch import on_main
from train.opening import Run, open_reader, open_run, read_recipe

SHARD_BYTES = 2**28
"""Minimum size of a file, except the last one of each process."""


def fill(arguments: Sequence[str]) -> int:
    """Compute the features of every training row of a recipe, seal their folder, and return the exit status 0."""
    recipe = read_recipe(arguments)
    settings = recipe.features
    if not isinstance(settings, CacheFeatures):
        raise UserError(f"{arguments[0]}: features.kind: expected cache, got {settings.kind}")
    with open_run(recipe) as run:
        source, tokenizer = open_source(settings.filled_by, recipe, run.accelerator, run.tracker.say)
        head = make_head(recipe.head, source.target, torch.zeros(source.target.vocab_size, dtype=torch.int64))
        reader = open_reader(recipe.data, tokenizer, run)
        mixture, _ = load_data(recipe.data, recipe.train.seed, head, source.target, reader, run.folder.path)
        source.check(mixture, head.aux_layer_ids)
        try:
            fill_folder(settings, source, mixture, head.aux_layer_ids, recipe.train.batch_size, run)
        finally:
            source.close()
    return 0


def fill_folder(
    settings: CacheFeatures,
    source: FeatureSource,
    mixture: Mixture,
    aux_layer_ids: Sequence[int],
    batch_size: int,
    run: Run,
) -> None:
    """Write the features of all rows of `mixture`; each process computes its share. Rows that an interrupted run has
    written are kept. UserError, before anything is computed, if the disk has too little space."""
    folder, accelerator = Path(settings.folder), run.accelerator
    about = describe(source.target, aux_layer_ids, settings.dtype, accelerator.mixed_precision, mixture)
    streams = len(aux_layer_ids) + 1

    def begin() -> set[bytes] | None:
        found = begin_folder(folder, about)
        if found is None:
            run.tracker.say(f"features.folder {folder}: filled already")
            return None
        written = sum(path.stat().st_size for path in folder.glob("rows-*.safetensors"))
        tokens = sum(int(pool.pieces[:, 1].sum()) for pool in mixture.pools)
        size = stored_bytes(tokens, streams, source.target.hidden_size, settings.dtype)
        run.tracker.say(f"features.folder {folder}: {size / 1e9:.3g} GB, of which {written / 1e9:.3g} GB are there")
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
    run.tracker.say(f"features.folder {folder}: filled")


def begin_folder(folder: Path, about: dict[str, Any]) -> set[bytes] | None:
    """Create a folder of features if necessary, and return the keys of the rows in it, or None if it is complete.
    UserError for a folder of other features."""
    check_folder(folder, "features.folder")
    manifest, begun = read_manifest(folder), folder / "filling.json"
    if manifest is not None:
        check_same(folder, manifest.about, about)
        if all((folder / name).is_file() for name in manifest.shards):
            return None
        (folder / "manifest.json").unlink()
    if begun.is_file():
        check_same(folder, json.loads(begun.read_bytes()), about)
    write_json(begun, about)
    return {key for path in sorted(folder.glob("rows-*.safetensors")) for key in Shard(path).rows}


def all_rows(mixture: Mixture, batch_size: int, accelerator: Accelerator, done: set[bytes]) -> Iterator[Rows]:
    """Yield this process's share of the rows of all pools in batches, without the rows that are `done`."""
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
