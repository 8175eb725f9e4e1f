"""Features from a vLLM server: `extract_hidden_states` with its ExampleHiddenStatesConnector.

A document is sent as token ids with one token to generate. The server writes the document's hidden states to a file in
a folder that both see, and names it in the answer:

    hidden_states (T, S, D)    the streams that enter the layers eagle_aux_hidden_state_layer_ids, ascending
    token_ids (T,)

Stream n, the number of layers, is the last layer's output before the final norm, which is applied here. Positions begin
at 0 for the server; rotary attention does not see that a later part of a long conversation has others.

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
"""Longest wait for the states of a document."""


class HiddenStatesServer:
    """Requests for hidden states, at most `in_flight` at a time, made by an event loop in a thread of its own."""

    def __init__(self, url: str, streams: Sequence[int], in_flight: int, patience: float = PATIENCE) -> None:
        """`streams`: ascending, those that the server was started for."""
        self.http = HTTPClient(url, patience=patience)
        self.streams, self.model, self.closed = list(streams), "", False
        self.asked: dict[bytes, list[Future[Tensor]]] = defaultdict(list)
        self.turns = asyncio.Semaphore(in_flight)
        self.loop = asyncio.new_event_loop()
        self.thread = Thread(target=self.loop.run_forever, name="hidden-states", daemon=True)
        self.thread.start()

    def ask(self, tokens: Tensor) -> None:
        """Ask for the states of a document, tokens (T,) int64 on the CPU."""
        future = asyncio.run_coroutine_threadsafe(self._states(tokens.tolist()), self.loop)
        self.asked[tokens.numpy().tobytes()].append(future)

    def take(self, tokens: Tensor) -> Tensor:
        """Wait for the states (T, S, D) of a document, which is asked for now if it was not. They are mapped from the
        server's file, which is deleted. UserError without an answer."""
        key = tokens.numpy().tobytes()
        if key not in self.asked:
            self.ask(tokens)
        first, *others = self.asked.pop(key)
        if others:
            self.asked[key] = others
        return first.result()

    def log_probabilities(self, tokens: Tensor) -> Tensor:
        """The server's own log-probabilities (T - 1,) of the tokens of a document from the second on."""
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
        """Drop what was asked for. Documents that are with the server are waited for: their files have to go."""

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
        """Map the tensors of the file that an answer names, and delete it. Waits until it is whole."""
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
                    fcntl.flock(held, fcntl.LOCK_SH)  # the server's writer holds it until the file is whole
            with file.open("rb"):  # whose errors tell more than safetensors' own
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
    """(row, slice, tokens) of each document of packed rows (B, T) on the CPU."""
    for row, numbers in enumerate(documents):
        kept, sizes = torch.unique_consecutive(numbers, return_counts=True)
        begin = 0
        for number, size in zip(kept.tolist(), sizes.tolist(), strict=True):
            if number >= 0:
                yield row, slice(begin, begin + size), tokens[row, begin : begin + size]
            begin += size
