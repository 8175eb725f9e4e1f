"""Features from a vLLM server with `extract_hidden_states` and its ExampleHiddenStatesConnector.

A document is sent as token ids, with one token to generate. The server writes the document's hidden states to a file in
a shared folder. Its answer contains the path. The file has:

    hidden_states (T, S, D)    the streams that enter the layers eagle_aux_hidden_state_layer_ids, ascending
    token_ids (T,)

Stream n, where n is the number of layers, is the last layer's output before the final norm; the norm is applied here.
The server counts positions from 0. A later part of a long conversation has larger positions, which makes no difference
to rotary attention, the only kind that is supported. The features are checked against the target before training.

Letters: T tokens of a document, S streams, D hidden.
"""

import asyncio
import fcntl
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from eval.servers.openai_client import RETRIES, ServerClient
from heads.core.contract import Rows
from heads.core.errors import UserError, first_line
from heads.core.files import lock
from heads.targets.families import final_norm
from heads.targets.frozen_target import Features, FrozenTarget
from train.core.processes import on_main
from train.data.answering_server import COMPLETIONS, TRIALS
from train.data.packing import Mixture
from train.features.feature_settings import VllmFeatures
from train.features.feature_source import FeatureSource

SECONDS = 600.0
"""Time limit of a request for the states of a document."""
LAST_SECONDS = 30.0
"""Time limit of the requests in flight when no more states are needed."""
CHECKED_ROWS = 8
LARGEST_DISTANCE = 0.2
"""Largest relative distance of hidden states. In bfloat16, engines differ by some per cent."""
LARGEST_DIFFERENCE = 0.1
"""Largest mean difference of log-probabilities."""


class HiddenStatesServer:
    """A client that requests hidden states, at most `in_flight` at a time, in an event loop in its own thread."""

    def __init__(self, url: str, streams: Sequence[int], in_flight: int, retries: int = RETRIES) -> None:
        """`streams`: the streams for which the server was started, ascending."""
        self.client = ServerClient(url, retries)
        self.streams = list(streams)
        self.model = ""
        self.closed = False
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
        request = self._complete(tokens.tolist(), prompt_logprobs=0)
        answer = asyncio.run_coroutine_threadsafe(request, self.loop).result()
        with suppress(OSError, SafetensorError):
            self._read(answer)
        try:
            rows = answer["choices"][0]["prompt_logprobs"][1:]
            return torch.tensor(
                [row[str(token)]["logprob"] for row, token in zip(rows, tokens[1:].tolist(), strict=True)]
            )
        except (LookupError, TypeError, ValueError):
            raise self.client.error("its answer lacks prompt_logprobs; serve the target with a stock vLLM") from None

    def close(self) -> None:
        """Drop pending requests. Wait for requests in flight, since their files have to be deleted."""

        async def end() -> None:
            self.closed = True
            if running := asyncio.all_tasks() - {asyncio.current_task()}:
                _, late = await asyncio.wait(running, timeout=LAST_SECONDS)
                for task in late:
                    task.cancel()
            await self.client.aclose()

        asyncio.run_coroutine_threadsafe(end(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    async def _states(self, tokens: list[int]) -> Tensor:
        for trial in range(1, TRIALS + 1):
            async with self.turns:
                if self.closed:
                    raise self.client.error("its states are not needed any more")
                answer = await self._complete(tokens)
                try:
                    tensors = await asyncio.to_thread(self._read, answer)
                    break
                except (OSError, SafetensorError) as error:
                    if trial == TRIALS:
                        raise self.client.error(f"its file cannot be read ({first_line(error)})") from None
        states = tensors.get("hidden_states")
        ids = tensors.get("token_ids")
        if states is None or ids is None or ids.tolist() != tokens:
            raise self.client.error("its file is not of the tokens sent; start it with --no-enable-prefix-caching")
        if states.dim() != 3 or states.shape[:2] != (len(tokens), len(self.streams)):
            raise self.client.error(
                f"its states have shape {tuple(states.shape)}, expected ({len(tokens)}, {len(self.streams)}, hidden); "
                f"start it with eagle_aux_hidden_state_layer_ids {self.streams}"
            )
        return states

    async def _complete(self, tokens: list[int], **more: object) -> Any:
        async with self.client.checking:
            if not self.model:
                models = await self.client.models()
                self.model = models[0]["id"] if models else ""
        body = {"model": self.model, "prompt": tokens, "max_tokens": 1, "temperature": 0, **more}
        return await self.client.send(COMPLETIONS, body, SECONDS)

    def _read(self, answer: Any) -> dict[str, Tensor]:
        """Memory-map the tensors of the file that an answer names, once it is complete, and delete the file. OSError or
        SafetensorError for a file that is absent or damaged."""
        try:
            file = Path(answer["kv_transfer_params"]["hidden_states_path"])
        except (LookupError, TypeError):
            raise self.client.error(
                "its answer names no file of hidden states; start it as train/README.md says"
            ) from None
        lock_file = Path(f"{file}.lock")
        try:
            if lock_file.exists():
                with lock_file.open() as held:
                    lock(held.fileno(), fcntl.LOCK_SH)  # the server's writer holds it until the file is complete
            with file.open("rb"):  # its errors say more than safetensors' own
                return load_file(file)
        except OSError as error:
            if isinstance(error, PermissionError) or not file.parent.is_dir():
                raise self.client.error(
                    f"cannot read {file} ({type(error).__name__}); share its folder with this user, at the same path"
                ) from None
            raise
        finally:
            for used in (file, lock_file):
                with suppress(OSError):
                    used.unlink()


def documents_of(tokens: Tensor, documents: Tensor) -> Iterator[tuple[int, slice, Tensor]]:
    """Yield (row, slice, tokens) of each document in packed rows (B, T) on the CPU."""
    for row, numbers in enumerate(documents):
        runs, sizes = torch.unique_consecutive(numbers, return_counts=True)
        begin = 0
        for number, size in zip(runs.tolist(), sizes.tolist(), strict=True):
            if number >= 0:
                yield row, slice(begin, begin + size), tokens[row, begin : begin + size]
            begin += size


class ServedFeatures(FeatureSource):
    """Features from a vLLM server, requested ahead of the steps."""

    def __init__(
        self, target: FrozenTarget, settings: VllmFeatures, rows_of_step: int, accelerator: Accelerator, **own: Any
    ) -> None:
        """`rows_of_step`: the rows of one process in a step."""
        super().__init__(target, **own)
        if target.start_token is not None or target.is_recurrent:
            raise UserError(f"{target.name}: vLLM does not extract its states; use features.kind=process")
        norm = final_norm(target.base, target.layers, target.hidden_size)
        if norm is None:
            raise UserError(f"{target.name}: no final norm was found, which vLLM leaves out; use features.kind=process")
        self.norm = norm
        self.settings = settings
        self.accelerator = accelerator
        self.steps_ahead = -(-settings.in_flight // rows_of_step) + 1
        self.server: HiddenStatesServer | None = None
        target.compute_by(self.fetch)

    def open_server(self, aux_layer_ids: Sequence[int]) -> HiddenStatesServer:
        """Return the server, and open it at the first call. `aux_layer_ids`: the layers that the head reads."""
        if self.server is None:
            streams = sorted({*aux_layer_ids, self.target.num_layers})
            self.server = HiddenStatesServer(self.settings.url, streams, self.settings.in_flight)
        return self.server

    def expect(self, rows: Rows) -> None:
        assert self.server is not None
        for _, _, tokens in documents_of(rows.tokens, rows.documents):
            self.server.ask(tokens)

    @torch.no_grad()
    def fetch(self, tokens: Tensor, positions: Tensor, documents: Tensor, aux_layer_ids: Sequence[int]) -> Features:
        """Return features of packed rows, (B, T) each, on the target's device. They are zero in the padding."""
        server = self.open_server(aux_layer_ids)
        target = self.target
        states = self.states(server, tokens.cpu(), documents.cpu())
        last = states[:, :, -1]
        aux = states[:, :, [server.streams.index(k) for k in aux_layer_ids]].flatten(2)
        hidden = self.norm(last.to(target.dtype))
        return Features(aux, hidden.masked_fill((documents < 0)[..., None], 0))

    def states(self, server: HiddenStatesServer, tokens: Tensor, documents: Tensor) -> Tensor:
        """Return all streams (B, T, S, D) from the server, on the target's device, for packed rows (B, T) on the
        CPU."""
        whole: Tensor | None = None
        for row, place, part in documents_of(tokens, documents):
            streams = server.take(part).to(self.target.device)
            if whole is None:
                whole = streams.new_zeros(*tokens.shape, *streams.shape[1:])
            whole[row, place] = streams
        assert whole is not None
        return whole

    def check(self, mixture: Mixture, aux_layer_ids: Sequence[int]) -> None:
        """Compare the server's states for some rows with those of a copy of the target or, without room for one, with
        the server's own log-probabilities. UserError for other layers, and for states after the final norm."""

        def act() -> None:
            rows = mixture.rows(range(CHECKED_ROWS))
            server = self.open_server(aux_layer_ids)
            if self.measures:
                with self.whole() as whole:
                    self._compare(server, whole, rows)
            else:
                self._compare_logits(server, rows)

        self.open_server(aux_layer_ids)
        try:
            on_main(self.accelerator, act)
        except BaseException:
            self.close()
            raise

    def _compare(self, server: HiddenStatesServer, whole: FrozenTarget, rows: Rows) -> None:
        """Raise UserError unless each stream is closest to the target's stream of the same layer, and close to it."""
        n = whole.num_layers
        inside = rows.documents >= 0
        known = sorted({k + step for k in server.streams for step in (-1, 0, 1)} & set(range(n + 1)))
        batch = [part.to(whole.device) for part in (rows.tokens, rows.positions, rows.documents)]
        features = whole.packed_features(batch[0], batch[1], batch[2], known)
        ours = features.aux_hidden_states.unflatten(-1, (len(known), -1)).cpu()[inside].float()
        names = [f"enters layer {k}" for k in known[:-1]] + ["leaves the last layer", "leaves the final norm"]
        candidates = torch.cat([ours, features.hidden.cpu()[inside].float()[:, None]], 1)  # (N, known + 1, D)
        theirs = self.states(server, rows.tokens, rows.documents).cpu()[inside].float()
        for place, k in enumerate(server.streams):
            apart = (candidates - theirs[:, place, None]).norm(dim=(0, 2)) / candidates.norm(dim=(0, 2))
            nearest = int(apart.argmin())
            expected = known.index(k)
            if nearest != expected:
                raise self._wrong(
                    server, f"its state number {place + 1} {names[nearest]}, expected what {names[expected]}"
                )
            if not float(apart[expected]) <= LARGEST_DISTANCE:
                raise self._wrong(
                    server, f"what {names[expected]} is {float(apart[expected]):.0%} from the target's own"
                )

    def _compare_logits(self, server: HiddenStatesServer, rows: Rows) -> None:
        """Raise UserError unless our final norm and output head turn the server's states into its own
        log-probabilities."""
        target = self.target
        apart = []
        for _, _, tokens in documents_of(rows.tokens, rows.documents):
            if len(tokens) > 1:
                last = server.take(tokens)[:-1, -1].to(target.device)
                ours = target.lm_head(self.norm(last.to(target.dtype))).log_softmax(-1)
                own = ours.gather(-1, tokens[1:, None].to(target.device))[:, 0].cpu()
                apart.append((own - server.log_probabilities(tokens)).abs())
        mean = float(torch.cat(apart).mean())
        if not mean <= LARGEST_DIFFERENCE:
            raise self._wrong(server, f"its last states give log-probabilities {mean:.2f} from its own")

    def _wrong(self, server: HiddenStatesServer, what: str) -> UserError:
        return server.client.error(
            f"{what}; serve {self.target.name} itself, with eagle_aux_hidden_state_layer_ids {server.streams}"
        )

    def close(self) -> None:
        if self.server is not None:
            self.server.close()
