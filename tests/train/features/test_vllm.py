"""Features from a server that writes its files as vLLM does, and its mistakes, found before they are trained on."""

import fcntl
import json
import re
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from heads.core.errors import UserError
from heads.targets.frozen_target import FrozenTarget
from heads.targets.layer_placement import drop_layers
from heads.targets.load import load_target
from tests.support.answering import QuietHandler, QuietServer
from tests.support.closeness import assert_close
from tests.support.faults import little_memory
from tests.support.packed_rows import packed_rows
from tests.support.refusals import refused
from tests.support.runs import Settings, train_in, weights
from train.features.feature_settings import VllmFeatures
from train.features.vllm import HiddenStatesServer, ServedFeatures
from train.recipe.recipe import Train
from train.steps.accelerate_launch import make_accelerator

IDS = (2, 4, 5)


class StubServer(QuietServer):
    """A server of the streams `ids` of a target."""

    def __init__(self, target: FrozenTarget, folder: Path, ids: Sequence[int]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.target, self.folder, self.ids = target, folder, list(ids)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.engine = ThreadPoolExecutor(1)  # one pass at a time, since hooks see all concurrent passes
        self.shift = 0
        """Added to the ids, like a server that numbers layers differently."""
        self.post_norm = False
        """True: the last stream is taken after the final norm."""
        self.away = 0
        """Number of next requests that get status 503."""
        self.lost = 0
        """Number of next requests whose file is never written."""
        self.busy = self.most_busy = 0

    def states(self, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the streams (T, S, D) of a document, and its hidden states (T, D) after the final norm."""
        target, n = self.target, self.target.num_layers
        ids = [min(max(k + self.shift, 0), n) for k in self.ids]
        row, known = torch.tensor([tokens]), sorted(set(ids))
        given = row, torch.arange(len(tokens))[None], torch.zeros_like(row), known
        features = self.engine.submit(target.packed_features, *given).result()
        by_id = dict(zip(known, features.aux_hidden_states[0].unflatten(-1, (len(known), -1)).unbind(1), strict=True))
        streams = [by_id[k] for k in ids]
        if self.post_norm:
            streams[-1] = features.hidden[0]
        return torch.stack(streams, 1), features.hidden[0]

    def log_probabilities(self, hidden: torch.Tensor, tokens: list[int]) -> list[Any]:
        logits = self.target.lm_head(hidden[:-1]).log_softmax(-1)
        own = logits.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()
        return [None, *({str(token): {"logprob": value}} for token, value in zip(tokens[1:], own, strict=True))]

    def write(self, path: Path, lock: Any, states: torch.Tensor, tokens: list[int]) -> None:
        time.sleep(0.002)  # the request is answered meanwhile
        save_file({"hidden_states": states.contiguous(), "token_ids": torch.tensor(tokens)}, path)
        lock.close()


class Handler(QuietHandler):
    server: StubServer
    protocol_version = "HTTP/1.1"  # connections are kept alive, as by vLLM
    wbufsize = -1

    def do_GET(self) -> None:
        assert self.path == "/v1/models"
        self.send(200, b'{"data": [{"id": "the-target"}]}')

    def do_POST(self) -> None:
        server, body = self.server, self.body()
        assert (self.path, body["model"], body["max_tokens"]) == ("/v1/completions", "the-target", 1)
        if server.away:
            server.away -= 1
            self.send(503, b'{"error": "starting"}')
            return
        tokens = body["prompt"]
        assert len(tokens) < server.target.context_length
        server.busy += 1
        server.most_busy = max(server.most_busy, server.busy)
        states, hidden = server.states(tokens)
        path = server.folder / f"{uuid.uuid4()}.safetensors"
        if server.lost:
            server.lost -= 1
        else:
            lock = path.with_name(path.name + ".lock").open("w")
            fcntl.flock(lock, fcntl.LOCK_EX)
            threading.Thread(target=server.write, args=(path, lock, states, tokens)).start()
        server.busy -= 1
        choice: dict[str, Any] = {"text": ""}
        if "prompt_logprobs" in body:
            choice["prompt_logprobs"] = server.log_probabilities(hidden, tokens)
        answer = {"choices": [choice], "kv_transfer_params": {"hidden_states_path": str(path)}}
        self.send(200, json.dumps(answer).encode())


@pytest.fixture
def target(tiny_target_dir: Path) -> FrozenTarget:
    return load_target(str(tiny_target_dir), dtype=torch.float32)


@pytest.fixture
def server(target: FrozenTarget, tmp_path: Path) -> Iterator[StubServer]:
    (tmp_path / "states").mkdir()
    with StubServer(target, tmp_path / "states", [*IDS, 8]) as stub:
        yield stub


@pytest.fixture
def served(settings: Settings, server: StubServer) -> Settings:
    head = {"kind": "eagle3", "depth": 2, "fc_norm": True, "aux_layer_ids": list(IDS)}
    return settings | {"head": head, "features": {"kind": "vllm", "url": server.url, "in_flight": 4}}


def test_a_servers_features_are_the_targets(server: StubServer, target: FrozenTarget, tiny_target_dir: Path) -> None:
    lean = load_target(str(tiny_target_dir), dtype=torch.float32, place=drop_layers)
    accelerator, rows = make_accelerator(Train(max_steps=1, precision="fp32")), packed_rows()
    source = ServedFeatures(lean, VllmFeatures(kind="vllm", url=server.url), 2, accelerator)
    found = lean.packed_features(rows.tokens, rows.positions, rows.documents, IDS)
    own, kept = target.packed_features(rows.tokens, rows.positions, rows.documents, IDS), rows.documents >= 0
    assert_close(found.aux_hidden_states[kept], own.aux_hidden_states[kept])
    assert_close(found.hidden[kept], own.hidden[kept])
    assert not found.hidden[~kept].any() and not list(server.folder.iterdir())
    source.close()


def test_training_and_resuming_from_a_server(served: Settings, server: StubServer) -> None:
    run = train_in(served)
    last = weights(run, 6)
    shutil.rmtree(run / "checkpoints/step-6")
    train_in(served)  # the order of the rows is a function of the step
    torch.testing.assert_close(weights(run, 6), last, rtol=1e-4, atol=1e-6)
    own = served | {"features": {"kind": "process"}, "output_dir": served["output_dir"] + "-own"}
    torch.testing.assert_close(weights(train_in(own), 6), last, rtol=1e-3, atol=1e-4)
    assert 1 < server.most_busy <= 4 and not list(server.folder.iterdir())


LAST = r"its last states give log-probabilities .* from its own"


@pytest.mark.parametrize(
    ("mistake", "memory", "words"),
    [
        ({"shift": -1}, nullcontext, "its state number 1 enters layer 1, expected what enters layer 2"),
        ({"post_norm": True}, nullcontext, "leaves the final norm, expected what leaves the last layer"),
        ({"shift": -1}, little_memory, LAST),
        ({"post_norm": True}, little_memory, LAST),
    ],
)
def test_wrong_layers_are_found_before_the_first_step_with_room_for_the_target_or_without(
    mistake: dict[str, Any], memory: Callable[[], Any], words: str, served: Settings, server: StubServer, tmp_path: Path
) -> None:
    model: Any = server.target.model
    model.model.norm.weight.data.uniform_(0.2, 3.0, generator=torch.Generator().manual_seed(0))  # two are not one
    served["target"] = {"path": shutil.copytree(served["target"]["path"], str(tmp_path / "normed"))}
    model.save_pretrained(tmp_path / "normed")
    vars(server).update(mistake)
    with memory(), pytest.raises(UserError, match=words):
        train_in(served)
    assert not Path(served["output_dir"], "metrics.jsonl").exists()


def test_a_server_that_was_away_is_asked_again(server: StubServer) -> None:
    server.away, server.lost = 2, 1
    with closing(HiddenStatesServer(server.url, server.ids, 2)) as client:
        assert client.take(torch.arange(6, 20)).shape == (14, 4, 32)


def test_faults_of_a_server_are_named(server: StubServer, tmp_path: Path) -> None:
    def states(ids: list[int]) -> None:
        with closing(HiddenStatesServer(server.url, ids, 2, retries=1)) as client:
            client.take(torch.arange(6, 20))

    with pytest.raises(ValueError, match="expected an address such as"):
        VllmFeatures(kind="vllm", url="nowhere")
    assert re.search(r"shape \(14, 4, 32\), expected .* start it with .*_layer_ids \[2, 8\]", refused(states, [2, 8]))
    server.lost = 9
    assert re.search(r"its file cannot be read \(.*No such file", refused(states, server.ids))
    server.folder = tmp_path / "elsewhere"
    assert re.search(r"cannot read .*elsewhere.*; share its folder", refused(states, server.ids))
