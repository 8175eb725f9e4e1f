"""A local server with the protocol of vLLM or SGLang, whose answers a function gives."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from eval.runtime.engine import Engine, EngineOptions, Request
from eval.runtime.sampling_params import Sampling
from heads.targets.frozen_target import FrozenTarget

Answer = Callable[[Request], list[int]]
Reply = tuple[int, bytes]
"""Status and body."""


@dataclass
class Stub:
    """The server's behaviour, which may change while it runs, and a record of its requests."""

    answer: Answer
    model: str = "tiny"
    speaks: str = "vllm"
    """The protocol: `vllm`, `sglang` or `text`."""
    key: str | None = None
    fault: Callable[[int], Reply | None] = lambda number: None
    """Returns a reply that replaces the answer to request `number`, counted from 0, or None."""
    hold: Callable[[], None] = lambda: None
    """Called before every answer; it may block."""
    asked: list[Request] = field(default_factory=list)
    answered: int = 0
    in_flight: int = 0
    most_in_flight: int = 0
    url: str = ""
    lock: Any = field(default_factory=threading.Lock)

    def reply(self, path: str, body: dict[str, Any]) -> Reply:
        ids, sampling = body.get("prompt"), body
        length, seed = "max_tokens", "seed"
        if path == "/generate" and self.speaks == "sglang":
            ids, sampling, length, seed = body["input_ids"], body["sampling_params"], "max_new_tokens", "sampling_seed"
        elif path != "/v1/completions":
            return 404, b'{"error": "no such path"}'
        else:
            assert body["model"] == self.model and body["return_token_ids"] is True
        drawn = Sampling(temperature=sampling["temperature"], seed=sampling[seed])
        assert isinstance(ids, list) and all(type(token) is int for token in ids)
        request = Request(ids, sampling[length], drawn)
        with self.lock:
            number = len(self.asked)
            self.asked.append(request)
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            self.hold()
            return self.fault(number) or (200, json.dumps(self._form(path, self.answer(request))).encode())
        finally:
            with self.lock:
                self.in_flight -= 1
                self.answered += 1

    def _form(self, path: str, ids: list[int]) -> dict[str, Any]:
        if path == "/generate":
            return {"text": "so", "output_ids": ids, "meta_info": {"finish_reason": {"type": "length"}}}
        known = {"token_ids": ids} if self.speaks == "vllm" else {}
        return {"object": "text_completion", "choices": [{"index": 0, "text": "so", **known}]}


class QuietServer(ThreadingHTTPServer):
    """A server that prints nothing on the terminal, and answers in its own thread during a `with` block."""

    daemon_threads = True
    request_queue_size = 256

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, *_: object) -> None:
        """Ignore clients that disconnect."""


class QuietHandler(BaseHTTPRequestHandler):
    """A handler that reads JSON bodies and sends replies, without log lines."""

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def body(self) -> Any:
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class _Server(QuietServer):
    stub: Stub


class _Handler(QuietHandler):
    server: _Server

    def do_GET(self) -> None:
        self._reply(200, json.dumps({"data": [{"id": self.server.stub.model}]}).encode())

    def do_POST(self) -> None:
        self._reply(*self.server.stub.reply(self.path, self.body()))

    def _reply(self, status: int, body: bytes) -> None:
        key = self.server.stub.key
        if key is not None and self.headers["Authorization"] != f"Bearer {key}":
            status, body = 401, b'{"error": {"message": "no key"}}'
        self.send(status, body)


@contextmanager
def serving(stub: Stub, port: int = 0) -> Iterator[Stub]:
    """Serve at `stub.url` for a `with` block."""
    with _Server(("127.0.0.1", port), _Handler) as server:
        server.stub, stub.url = stub, f"http://127.0.0.1:{server.server_port}"
        yield stub


def by_engine(target: FrozenTarget, max_length: int = 128) -> Answer:
    """Return a function that gives the target's own answers."""
    engine, lock = Engine(target, None, EngineOptions(max_length=max_length)), threading.Lock()

    def answer(request: Request) -> list[int]:
        with lock:
            return engine.generate([request])[0].tokens

    return answer
