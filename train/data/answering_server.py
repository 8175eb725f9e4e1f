"""Servers that run the target: vLLM, SGLang, or another one that accepts and returns token ids.

Prompts and answers are token ids, since tokenising an answer's text again may give other tokens than the model
generated. vLLM returns them from `/v1/completions` with `return_token_ids`, SGLang from `/generate`.
"""

import asyncio
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, aclosing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from eval.core.progress import Progress
from eval.runtime.request import Request
from eval.servers.engine_process import need_python, running
from eval.servers.openai_client import ServerClient, sampling_parameters
from eval.servers.served_texts import CHECKED_TOKENS, compare_draws, foreign_token
from heads.core.errors import UserError
from heads.core.host_memory import free_memory
from heads.targets.frozen_target import FrozenTarget
from heads.targets.hub import local_folder
from train.data.data_settings import Server
from train.data.dialogues import Dialogue

TRIALS = 3
"""Requests for an answer that comes back broken off."""
SLOWEST = 1.0
"""Time limit of an answer in seconds per token. One minute is added to it."""
COMPLETIONS, GENERATE = "/v1/completions", "/generate"
"""Paths that return token ids, of vLLM and of SGLang."""
GPU_SHARE = 0.9
"""Share of a GPU's free memory that an engine which is started here may use."""
CACHE_SHARE = 4
"""One of so many parts of the free memory is its cache, if it runs on the CPU."""
DRAWN_ANSWERS, DRAWN_TOKENS = 16, 128
"""Number of sampled answers with which a server is checked, and their tokens."""


@dataclass
class AnsweringServer:
    client: ServerClient
    model: str
    """Name of the target on the server."""
    target: FrozenTarget
    in_flight: int = 1
    """Most requests at a time."""
    path: str = field(default="", init=False)
    """The path that returns token ids; empty until the server has been checked."""

    async def answer(self, request: Request) -> list[int]:
        """Return the answer to a request. UserError if the server refuses, or gives none in all trials."""
        async with self.client.checking:
            self.path = self.path or await self._check_server(request)
        for _ in range(TRIALS):
            ids = await self._ask(self.path, request)
            if ids and (len(ids) == request.max_new_tokens or ids[-1] in self.target.eos_token_ids):
                return ids
        what = f"an answer of {len(ids)} tokens broke off" if ids else f"{self.path} gives no token ids"
        raise self.client.error(f"{what}; fix the server, and run the same command again")

    async def _check_server(self, request: Request) -> str:
        """Check that the server is reachable and has the target, and return its path. Trial answers are not kept."""
        models = [card["id"] for card in await self.client.models()]
        if self.model not in models:
            raise self.client.error(
                f"expected a server of {self.model}, it serves {', '.join(models) or 'none'}; name the target there "
                "with data.regenerate.server.model, or serve it"
            )
        trial = replace(
            request,
            max_new_tokens=min(request.max_new_tokens, CHECKED_TOKENS),
            sampling=request.sampling.model_copy(update={"temperature": 0.0}),
        )
        ids, path = await self._ask(COMPLETIONS, trial, retries=0), COMPLETIONS
        if not ids:
            with suppress(UserError):
                ids, path = await self._ask(GENERATE, trial, retries=0), GENERATE
        if not ids:
            raise self.client.error(
                "gives text and no token ids, neither from /v1/completions nor from /generate; text may be tokenised "
                "otherwise than it was written; use vLLM or SGLang"
            )
        if self.target.placement != "whole":
            return path
        if (fault := foreign_token(self.target, trial.prompt, ids)) is not None:
            raise self.client.error(
                f"expected the target's greedy answer: {fault}; serve the same weights as target.path, in the same "
                "precision"
            )
        if request.sampling.temperature > 0:
            await self._check_draws(path, request)
        return path

    async def _check_draws(self, path: str, request: Request) -> None:
        """Raise UserError if sampled answers cannot be drawn from the target's distribution."""
        length, sampling = min(request.max_new_tokens, DRAWN_TOKENS), request.sampling
        trials = [
            replace(request, max_new_tokens=length, sampling=sampling.model_copy(update={"seed": sampling.seed ^ n}))
            for n in range(1, DRAWN_ANSWERS + 1)
        ]
        slots = asyncio.Semaphore(self.in_flight)

        async def ask(trial: Request) -> list[int] | None:
            async with slots:
                return await self._ask(path, trial)

        answers = await asyncio.gather(*map(ask, trials))
        texts = [ids for ids in answers if ids]
        draws = compare_draws(self.target, [request.prompt] * len(texts), texts, sampling) if texts else None
        if draws is not None and draws.excess() > 1:
            raise self.client.error(
                f"its sampled texts are not the target's at T = {sampling.temperature:g}: {draws.record()}; they would "
                "be wrong as training data: serve the target without a draft, or in another version"
            )

    async def _ask(self, path: str, request: Request, retries: int | None = None) -> list[int] | None:
        """Return the token ids in the server's reply, or None. UserError for ids that the target does not have."""
        prompt, length, seed = list(request.prompt), request.max_new_tokens, request.sampling.seed
        sampling = sampling_parameters(request.sampling, self.target.eos_token_ids)
        if path == GENERATE:
            sampling |= {"max_new_tokens": length, "sampling_seed": seed}
            body: dict[str, object] = {"input_ids": prompt, "sampling_params": sampling}
        else:
            body = {"model": self.model, "prompt": prompt, "max_tokens": length, "seed": seed, **sampling}
            body["return_token_ids"] = True
        reply = await self.client.send(path, body, 60 + SLOWEST * length, retries)
        try:
            ids: list[int] | None = reply["output_ids"] if path == GENERATE else reply["choices"][0]["token_ids"]
        except (LookupError, TypeError):
            return None
        num_tokens = self.target.vocab_size
        if ids and max(ids) >= num_tokens:
            raise self.client.error(
                f"expected token ids below {num_tokens}, got {max(ids)}; it serves another model than the target"
            )
        return ids


@contextmanager
def serving(server: Server, target: FrozenTarget, in_flight: int, length: int) -> Iterator[str]:
    """Give the address of the server for a `with` block: of a running one, or of an engine that is started for it, on
    this process's device. UserError if there is no such engine, or if it would run other weights than the target's."""
    if server.url is not None:
        yield server.url
        return
    name = server.engine or ""
    python, device = need_python(name), target.device
    own = {"adapter": target.merged_adapter, "gguf_file": target.gguf_file, "quantize": target.quantize}
    if changed := [key for key, value in own.items() if value]:
        raise UserError(
            f"data.regenerate.server.engine: {name} would answer without target.{changed[0]}; leave the "
            "server out, or serve these weights, and give the server's url"
        )
    free = free_memory() or 0
    job = {"target": local_folder(target.name), "name": server.model or target.name, "context": length}
    job |= {"dtype": str(target.dtype).removeprefix("torch."), "trust_remote_code": target.trust_remote_code}
    job |= {"rows": in_flight, "cache_gib": max(1, free // CACHE_SHARE // 2**30), "device": None, "share": GPU_SHARE}
    if device.type == "cuda":
        left, total = torch.cuda.mem_get_info(device)
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        number = device.index or 0
        job |= {"device": seen.split(",")[number] if seen else str(number), "share": round(GPU_SHARE * left / total, 2)}
    with tempfile.TemporaryDirectory(prefix="draftsmith-") as folder, ExitStack() as stack:
        with Progress(f"starting {name}", announced=True):
            started = running(python, f"{name}_server.py", job, what=f"{name} fails", folder=Path(folder))
            url = stack.enter_context(started)
        yield url


def answer_by_server(
    dialogues: Iterator[tuple[int, Dialogue]],
    request_of: Callable[[list[int]], Request],
    server: AnsweringServer,
    in_flight: int,
    write: Callable[[int, Dialogue], None],
    count: Callable[[int], None],
) -> None:
    """Let the server answer the numbered dialogues, `in_flight` at a time. `write` is called with each that ends, and
    `count` with the number of tokens of each answer."""

    async def work() -> None:
        for number, dialogue in dialogues:
            while dialogue.prompt is not None:
                answer = await server.answer(request_of(dialogue.prompt))
                count(len(answer))
                dialogue.answer(answer)
            write(number, dialogue)

    async def main() -> None:
        async with aclosing(server.client), asyncio.TaskGroup() as group:
            for _ in range(in_flight):
                group.create_task(work())

    try:
        asyncio.run(main())
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
