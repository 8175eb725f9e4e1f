"""Features from a vLLM server: `extract_hidden_states` with its ExampleHiddenStatesConnector.

A document is sent as token ids with one token to generate. The server writes the document's hidden states to a file in
a folder that both see, and names it in the answer:

    hidden_states (T, S, D)    the streams that enter the layers eagle_aux_hidden_state_layer_ids, ascending
    token_ids (T,)

Stream n, the number of layers, is the last layer's output before the final norm, which is applied here. Positions begin
at 0 for the server; rotary attention does not see that a later part of a long conversation has others.

Letters: T tokens of a document, S streams, D hidden.
"""

import fcntl
import json
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from heads.errors import UserError, first_line, warn_once

PATIENCE = 600.0
"""Seconds for which a server may be away."""
LONGEST_PAUSE = 8.0
REQUEST_TIMEOUT = 600.0


class NoAnswerYet(Exception):
    """A request that failed for now: the server is away, or was lost before it had written its file."""


class HiddenStatesServer:
    """Requests to one server, at most `in_flight` at a time, made in the background."""

    def __init__(self, url: str, streams: Sequence[int], in_flight: int, patience: float = PATIENCE) -> None:
        """`streams`: ascending, those that the server was started for."""
        self.url, self.streams, self.patience = url.rstrip("/"), list(streams), patience
        self.pool = ThreadPoolExecutor(in_flight, thread_name_prefix="hidden-states")
        self.asked: dict[bytes, deque[Future[Tensor]]] = defaultdict(deque)
        self.model: str | None = None
        self.closed = False

    def ask(self, tokens: Tensor) -> None:
        """Ask for the states of a document, tokens (T,) int64 on the CPU."""
        self.asked[key_of(tokens)].append(self.pool.submit(self._states, tokens.tolist()))

    def take(self, tokens: Tensor) -> Tensor:
        """Wait for the states (T, S, D) of a document, which is asked for now if it was not. UserError without an
        answer."""
        key = key_of(tokens)
        if not self.asked[key]:
            self.ask(tokens)
        future = self.asked[key].popleft()
        if not self.asked[key]:
            del self.asked[key]
        return future.result()

    def log_probabilities(self, tokens: Tensor) -> Tensor:
        """The server's own log-probabilities (T - 1,) of the tokens of a document from the second on."""
        answer = self._patiently(lambda: self._complete(tokens.tolist(), prompt_logprobs=0))
        with suppress(NoAnswerYet):
            self._read(answer)
        try:
            rows = answer["choices"][0]["prompt_logprobs"][1:]
            return torch.tensor(
                [row[str(token)]["logprob"] for row, token in zip(rows, tokens[1:].tolist(), strict=True)]
            )
        except (LookupError, TypeError, ValueError):
            raise self.fault("its answer lacks prompt_logprobs", "serve the target with a stock vLLM") from None

    def close(self) -> None:
        """Drop what was asked for."""
        self.closed = True
        self.pool.shutdown(wait=False, cancel_futures=True)

    def fault(self, what: str, remedy: str) -> UserError:
        """An error that names the server."""
        return UserError(f"features.url {self.url}: {what}; {remedy}")

    def _states(self, tokens: list[int]) -> Tensor:
        found: dict[str, Tensor] = self._patiently(lambda: self._read(self._complete(tokens)))
        states, ids = found.get("hidden_states"), found.get("token_ids")
        if states is None or ids is None or ids.tolist() != tokens:
            raise self.fault("its file is not of the tokens sent", "start it with --no-enable-prefix-caching")
        if states.dim() != 3 or states.shape[:2] != (len(tokens), len(self.streams)):
            raise self.fault(
                f"its states have shape {tuple(states.shape)}, expected ({len(tokens)}, {len(self.streams)}, hidden)",
                f"start it with eagle_aux_hidden_state_layer_ids {self.streams}",
            )
        return states

    def _patiently(self, request: Any) -> Any:
        """The result of a request, made again while the server is away."""
        began, pause = time.monotonic(), 0.25
        while True:
            try:
                return request()
            except NoAnswerYet as error:
                if time.monotonic() - began > self.patience or self.closed:
                    raise self.fault(
                        f"no answer for {self.patience:.0f} s ({error})",
                        "start it again and run the same command, which goes on from the last checkpoint",
                    ) from None
                warn_once(f"features.url {self.url}: {error}; asked again for {self.patience:.0f} s")
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)

    def _complete(self, tokens: list[int], **more: Any) -> dict[str, Any]:
        if self.model is None:
            try:
                self.model = str(self._request("/v1/models")["data"][0]["id"])
            except (LookupError, TypeError):
                raise self.fault("does not name its model at /v1/models", "give a vLLM server's address") from None
        body = {"model": self.model, "prompt": tokens, "max_tokens": 1, "temperature": 0, **more}
        return self._request("/v1/completions", body)

    def _request(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            data = None if body is None else json.dumps(body).encode()
            request = Request(self.url + path, data, {"Content-Type": "application/json"})
        except ValueError as error:
            raise self.fault(first_line(error), "give an address such as http://localhost:8000") from None
        try:
            with urlopen(request, timeout=REQUEST_TIMEOUT) as answer:
                return dict(json.loads(answer.read()))
        except HTTPError as error:
            said = error.read(2000).decode(errors="replace").strip().splitlines()
            if 400 <= error.code < 500 and error.code not in (408, 429):
                raise self.fault(f"refuses ({error.code}: {' '.join(said)[:300]})", "mend its settings") from None
            raise NoAnswerYet(f"status {error.code}") from None
        except (OSError, HTTPException, ValueError) as error:  # refused, cut off, or half an answer
            raise NoAnswerYet(first_line(error)) from None

    def _read(self, answer: dict[str, Any]) -> dict[str, Tensor]:
        """The tensors of the file that an answer names, which is deleted."""
        path = (answer.get("kv_transfer_params") or {}).get("hidden_states_path")
        if not isinstance(path, str):
            raise self.fault("its answer names no file of hidden states", "start it as train/README.md says")
        file, lock = Path(path), Path(path + ".lock")
        if not file.parent.is_dir():
            raise self.fault(f"its folder {file.parent} is not on this machine", "share it at the same path")
        try:
            if lock.exists():
                with lock.open() as held:
                    fcntl.flock(held, fcntl.LOCK_SH)  # the server's writer holds it until the file is whole
            return load(file.read_bytes())
        except PermissionError as error:
            raise self.fault(
                f"its file cannot be read ({first_line(error)})", "share its folder with this user"
            ) from None
        except (OSError, SafetensorError) as error:
            raise NoAnswerYet(f"{file.name}: {first_line(error)}") from None
        finally:
            for used in (file, lock):
                with suppress(OSError):
                    used.unlink()


def key_of(tokens: Tensor) -> bytes:
    """The tokens (T,) of a document as a key."""
    return tokens.numpy().tobytes()


def documents_of(tokens: Tensor, documents: Tensor) -> Iterator[tuple[int, slice, Tensor]]:
    """(row, slice, tokens) of each document of packed rows (B, T) on the CPU."""
    for row, numbers in enumerate(documents):
        kept, sizes = torch.unique_consecutive(numbers, return_counts=True)
        begin = 0
        for number, size in zip(kept.tolist(), sizes.tolist(), strict=True):
            if number >= 0:
                yield row, slice(begin, begin + size), tokens[row, begin : begin + size]
            begin += size
