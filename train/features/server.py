"""A client for features from a vLLM server with `extract_hidden_states` and its ExampleHiddenStatesConnector.

A document is sent as token ids, with one token to generate. The server writes the document's hidden states to a file in
a shared folder. Its answer contains the path. The file has:

    hidden_states (T, S, D)    the streams that enter the layers eagle_aux_hidden_state_layer_ids, ascending
    token_ids (T,)

Stream n, where n is the number of layers, is the last layer's output before the final norm; the norm is applied here.
The server counts positions from 0. A later part of a long conversation has larger positions, which makes no difference
to rotary attention.

Letters: T tokens of a document, S streams, D hidden.
"""

import asyncio
import fcntl
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from heads.errors import first_line
from train.http_client import PATIENCE, Fault, HTTPClient

SECONDS = 600.0
"""Time limit of a request for the states of a document."""


class HiddenStatesServer:
    """A client that requests hidden states, at most `in_flight` at a time, in an event loop in its own thread."""

    def __init__(self, url: str, streams: Sequence[int], in_flight: int, patience: float = PATIENCE) -> None:
        """`streams`: the streams for which the server was started, ascending."""
        self.http = HTTPClient(url, patience=patience)
        self.streams, self.model, self.closed = list(streams), "", False
        self.asked: dict[bytes, list[Future[Tensor]]] = defaultdict(list)
        self.turns = asyncio.Semaphore(in_flight)
        self.loop = asyncio.new_event_loop()
        self.thread = Thread(target=self.loop.run_forever, name="hidden-states", daemon=True)
        self.thread.start()

    def ask(self, tokens: Tensor) -> None:
        """Request the states of a document with tokens (T,) int64 on the CPU. Do not wait for them."""
        future = asyncio.run_coroutine_threadsafe(self._states(tokens.tolist()), self.loop)
        self.asked[tokens.numpy().tobytes()].append(future)

    def take(self, tokens: Tensor) -> Tensor:
        """Wait for the states (T, S, D) of a document, and return them. Request them first if `ask` has not. They are
        memory-mapped from the server's file, which is deleted. UserError without an answer."""
        key = tokens.numpy().tobytes()
        if key not in self.asked:
            self.ask(tokens)
        first, *others = self.asked.pop(key)
        if others:
            self.asked[key] = others
        return first.result()

    def log_probabilities(self, tokens: Tensor) -> Tensor:
        """Return the server's own log-probabilities (T - 1,) of a document's tokens from the second on."""
        asked = self.http.patiently(partial(self._complete, tokens.tolist(), prompt_logprobs=0))
        answer = asyncio.run_coroutine_threadsafe(asked, self.loop).result()
        with suppress(Fault):
            self._read(answer)
        try:
            rows = answer["choices"][0]["prompt_logprobs"][1:]
            return torch.tensor(
                [row[str(token)]["logprob"] for row, token in zip(rows, tokens[1:].tolist(), strict=True)]
            )
        except (LookupError, TypeError, ValueError):
            raise self.http.error("its answer lacks prompt_logprobs; serve the target with a stock vLLM") from None

    def close(self) -> None:
        """Drop pending requests. Wait for requests in flight, since their files have to be deleted."""

        async def end() -> None:
            self.closed, self.http.patience = True, 0.0
            await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)
            await self.http.aclose()

        asyncio.run_coroutine_threadsafe(end(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    async def _states(self, tokens: list[int]) -> Tensor:
        async def trial() -> dict[str, Tensor]:
            async with self.turns:
                if self.closed:
                    raise Fault("it is not needed any more")
                return await asyncio.to_thread(self._read, await self._complete(tokens))

        found = await self.http.patiently(trial)
        states, ids = found.get("hidden_states"), found.get("token_ids")
        if states is None or ids is None or ids.tolist() != tokens:
            raise self.http.error("its file is not of the tokens sent; start it with --no-enable-prefix-caching")
        if states.dim() != 3 or states.shape[:2] != (len(tokens), len(self.streams)):
            raise self.http.error(
                f"its states have shape {tuple(states.shape)}, expected ({len(tokens)}, {len(self.streams)}, hidden); "
                f"start it with eagle_aux_hidden_state_layer_ids {self.streams}"
            )
        return states

    async def _complete(self, tokens: list[int], **more: Any) -> Any:
        async with self.http.checking:
            self.model = self.model or (await self.http.models())[0]
        body = {"model": self.model, "prompt": tokens, "max_tokens": 1, "temperature": 0, **more}
        return await self.http.send("/v1/completions", body, SECONDS)

    def _read(self, answer: Any) -> dict[str, Tensor]:
        """Memory-map the tensors of the file that an answer names, once it is complete, and delete the file."""
        try:
            file = Path(answer["kv_transfer_params"]["hidden_states_path"])
        except (LookupError, TypeError):
            raise self.http.error(
                "its answer names no file of hidden states; start it as train/README.md says"
            ) from None
        lock = Path(f"{file}.lock")
        try:
            if lock.exists():
                with lock.open() as held:
                    fcntl.flock(held, fcntl.LOCK_SH)  # the server's writer holds it until the file is complete
            with file.open("rb"):  # its errors say more than safetensors' own
                return load_file(file)
        except (OSError, SafetensorError) as error:
            if isinstance(error, PermissionError) or not file.parent.is_dir():
                raise self.http.error(
                    f"cannot read {file} ({type(error).__name__}); share its folder with this user, at the same path"
                ) from None
            raise Fault(f"{file.name}: {first_line(error)}") from None
        finally:
            for used in (file, lock):
                with suppress(OSError):
                    used.unlink()


def documents_of(tokens: Tensor, documents: Tensor) -> Iterator[tuple[int, slice, Tensor]]:
    """Yield (row, slice, tokens) of each document in packed rows (B, T) on the CPU."""
    for row, numbers in enumerate(documents):
        kept, sizes = torch.unique_consecutive(numbers, return_counts=True)
        begin = 0
        for number, size in zip(kept.tolist(), sizes.tolist(), strict=True):
            if number >= 0:
                yield row, slice(begin, begin + size), tokens[row, begin : begin + size]
            begin += size
