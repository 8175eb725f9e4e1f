"""A head whose files were damaged is refused in one line, or is a head: it drafts, and it can be published."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from eval.benchmark.loading import fitting_head
from eval.reporting.publication import collect
from eval.runtime.engine import Engine, EngineOptions, Request
from heads.checkpoint import CONFIG, save_head, target_record
from heads.errors import UserError
from heads.files import file_hash
from heads.registry import build_head
from heads.target.model import FrozenTarget
from heads.tree import parse_shape
from tests.mutations import damage_bytes, mutate

KINDS: dict[str, dict[str, Any]] = {
    "eagle3": {},
    "medusa": {},
    "mtp": {},
    "draft": {"layers": (1, 6)},
    "dflash": {"num_layers": 2, "sliding_window": 9},
    "dflash2": {"num_layers": 2, "selector_rank": 4},
    "dspark": {"num_layers": 2, "markov_rank": 4},
}


@pytest.fixture(scope="module", params=KINDS)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_target: FrozenTarget) -> Path:
    """A head's folder."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        head = build_head(request.param, KINDS[request.param], tiny_target, torch.arange(tiny_target.vocab_size))
    folder = tmp_path_factory.mktemp(request.param) / "head"
    save_head(head, folder, target=target_record(tiny_target), provenance={"data": {"sources": []}})
    return folder


def spoil(folder: Path, rng: random.Random) -> None:
    """Damage one of a head's two files; its record vouches for damaged weights."""
    file, weights = folder / CONFIG, next(folder.glob("*.safetensors"))
    config = json.loads(file.read_text())
    match rng.randrange(5):
        case 0:
            file.write_bytes(damage_bytes(file.read_bytes(), rng))
            return
        case 1:
            config = mutate(config, rng)
        case 2:
            config["draftsmith"] = mutate(config["draftsmith"], rng)
        case 3:
            section = rng.choice(("config", "target"))
            config["draftsmith"][section] = mutate(config["draftsmith"][section], rng)
        case _:
            data = weights.read_bytes()
            size = 8 + int.from_bytes(data[:8], "little")
            if rng.random() < 0.5:
                weights.write_bytes(damage_bytes(data, rng, within=size))
            else:
                header = json.dumps(mutate(json.loads(data[8:size]), rng)).encode()
                weights.write_bytes(len(header).to_bytes(8, "little") + header + data[size:])
            config["draftsmith"]["sha256"] = file_hash(weights)
    file.write_text(json.dumps(config))


def use(folder: Path, target: FrozenTarget) -> None:
    """Draft some tokens with a head, and collect what would be published of it."""
    head = fitting_head(str(folder), target)
    engine = Engine(target, head, EngineOptions(shape=parse_shape("chain:2"), batch_size=1, max_length=32))
    assert len(engine.generate([Request([5, 6, 7], 6)])[0].tokens) <= 6
    assert collect(folder.parent, "ann/a-head", unmeasured=True, unserved=True).sizes()


@pytest.mark.parametrize(("seed", "count"), [(0, 12), pytest.param(1, 59, marks=pytest.mark.slow)])
def test_a_damaged_head_is_refused_in_one_line_or_is_one(
    seed: int, count: int, whole: Path, tiny_target: FrozenTarget, tmp_path: Path
) -> None:
    use(whole, tiny_target)
    rng, refused = random.Random(seed), 0
    for n in range(count):
        folder = tmp_path / str(n) / "head"
        shutil.copytree(whole, folder)
        spoil(folder, rng)
        try:
            use(folder, tiny_target)
        except UserError as error:
            assert str(error) and "\n" not in str(error), error
            refused += 1
        shutil.rmtree(folder.parent)
    assert refused > count / 2
