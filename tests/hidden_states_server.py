"""A stub of a vLLM server with `extract_hidden_states`: its answers, files, locks and faults."""

import fcntl
import json
import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from heads.target.model import FrozenTarget
from tests.answering import QuietHandler, QuietServer


class StubServer(QuietServer):
    """A server of the streams `ids` of a target, in its own thread. It is a context manager."""

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
        self.completions = "/v1/completions"
        self.busy = self.most_busy = self.served = 0

    def __enter__(self) -> "StubServer":
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.shutdown()
        self.server_close()

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
        """Return the log-probabilities of a document in vLLM's form."""
        logits = self.target.lm_head(hidden[:-1]).log_softmax(-1)
        own = logits.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()
        return [None, *({str(token): {"logprob": value}} for token, value in zip(tokens[1:], own, strict=True))]

    def write(self, path: Path, lock: Any, states: torch.Tensor, tokens: list[int]) -> None:
        """Write a file shortly after its request was answered."""
        time.sleep(0.002)
        save_file({"hidden_states": states.contiguous(), "token_ids": torch.tensor(tokens)}, path)
        lock.close()


class Handler(QuietHandler):
    """The handler of the server's two paths."""

    server: StubServer
    protocol_version = "HTTP/1.1"  # connections are kept alive, as by vLLM
    wbufsize = -1

    def answer(self, status: int, body: Any) -> None:
        self.send(status, json.dumps(body).encode())

    def do_GET(self) -> None:
        known = self.path == "/v1/models"
        self.answer(200 if known else 404, {"data": [{"id": "the-target"}]} if known else {})

    def do_POST(self) -> None:
        server, body = self.server, self.body()
        if self.path != server.completions:
            self.answer(404, {})
            return
        assert body["model"] == "the-target" and body["max_tokens"] == 1
        if server.away:
            server.away -= 1
            self.answer(503, {"error": "starting"})
            return
        tokens = body["prompt"]
        if len(tokens) >= server.target.context_length:
            self.answer(400, {"error": {"message": "too long"}})
            return
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
        server.served += 1
        choice: dict[str, Any] = {"text": ""}
        if "prompt_logprobs" in body:
            choice["prompt_logprobs"] = server.log_probabilities(hidden, tokens)
        self.answer(200, {"choices": [choice], "kv_transfer_params": {"hidden_states_path": str(path)}})
