"""Answers from a server that runs the target: vLLM, SGLang, or another one that accepts and returns token ids.

Prompts and answers are token ids, since tokenising an answer's text again may give other tokens than the model
generated. vLLM returns them from `/v1/completions` with `return_token_ids`, SGLang from `/generate`.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from train.data.answer_store import AnswerStore
from train.data.dialogues import Dialogue
from train.http_client import Fault, HTTPClient, Missing

if TYPE_CHECKING:
    from eval.runtime.request import Request

SLOWEST = 1.0
"""Time limit of an answer in seconds per token. One minute is added to it."""
COMPLETIONS, GENERATE = "/v1/completions", "/generate"
"""Paths that return token ids, of vLLM and of SGLang."""
CHECKED_TOKENS = 16
"""Tokens of the greedy answer with which a server is checked."""

Check = Callable[[Sequence[int], Sequence[int]], str | None]
"""(prompt, greedy answer) -> what is wrong with the answer, or None."""


def _body(path: str, model: str, request: "Request", eos_token_ids: Sequence[int]) -> dict[str, Any]:
    """Return the body of a request for token ids from the target's own distribution. It sets all sampling parameters,
    since servers take missing ones from the model's generation_config.json."""
    prompt, length, seed = list(request.prompt), request.max_new_tokens, request.sampling.seed
    sampling = {
        "temperature": request.sampling.temperature,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": list(eos_token_ids),
    }
    if path == GENERATE:
        length_and_seed = {"max_new_tokens": length, "sampling_seed": seed}
        return {"input_ids": prompt, "sampling_params": sampling | length_and_seed}
    return {"model": model, "prompt": prompt, "max_tokens": length, "seed": seed, "return_token_ids": True} | sampling


@dataclass
class Client:
    """A client that requests answers of a target."""

    http: HTTPClient
    model: str
    """Name of the target on the server."""
    vocab_size: int
    eos_token_ids: Sequence[int]
    check: Check
    path: str | None = None
    """The path that returns token ids; None until the server has been checked."""

    async def answer(self, request: "Request") -> list[int]:
        """Return the answer to a request. UserError if the server refuses, or gives none for `patience` seconds."""
        async with self.http.checking:
            path = self.path = self.path or await self._check_server(request)
        return await self.http.patiently(lambda: self._ask(path, request))

    async def _check_server(self, request: "Request") -> str:
        """Check that the server is reachable and has the target, and return its path. The trial answer is not kept."""
        trial = replace(
            request,
            max_new_tokens=min(request.max_new_tokens, CHECKED_TOKENS),
            sampling=replace(request.sampling, temperature=0.0),
        )
        try:
            models = await self.http.models()
            if self.model not in models:
                raise self.http.error(
                    f"expected a server of {self.model}, it serves {', '.join(models)}; name the target "
                    "there with data.regenerate.server.model, or serve it"
                )
            for path in (COMPLETIONS, GENERATE):
                with suppress(Missing):
                    ids = await self._ask(path, trial)
                    if fault := self.check(trial.prompt, ids):
                        raise self.http.error(fault)
                    return path
        except Fault as fault:
            raise self.http.error(f"{fault}; start the server, or mend it, and begin again") from None
        raise self.http.error(
            "gives text and no token ids, neither from /v1/completions nor from /generate; text may be tokenised "
            "otherwise than it was written; use vLLM or SGLang"
        )

    async def _ask(self, path: str, request: "Request") -> list[int]:
        body = _body(path, self.model, request, self.eos_token_ids)
        reply = await self.http.send(path, body, 60 + SLOWEST * request.max_new_tokens)
        try:
            ids = reply["output_ids"] if path == GENERATE else reply["choices"][0]["token_ids"]
        except (LookupError, TypeError):
            ids = None
        if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
            raise (Missing if self.path is None else Fault)(f"{path} gives no token ids")
        if not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise self.http.error(
                f"expected token ids below {self.vocab_size}, got {max(ids, key=abs)}; it serves another model than "
                "the target"
            )
        if len(ids) != request.max_new_tokens and ids[-1] not in self.eos_token_ids:
            raise Fault(f"an answer of {len(ids)} tokens broke off")
        return ids


def answer_by_server(
    dialogues: Iterator[Dialogue],
    store: AnswerStore,
    request_of: Callable[[list[int]], "Request"],
    client: Client,
    in_flight: int,
    done: Callable[[Dialogue], None],
) -> None:
    """Let the server answer the dialogues, `in_flight` at a time, and store the answers."""
    asked: dict[tuple[int, ...], asyncio.Task[list[int]]] = {}

    async def ask(prompt: list[int]) -> list[int]:
        ids = await client.answer(request_of(prompt))
        store.add(prompt, ids)
        return ids

    async def work(group: asyncio.TaskGroup) -> None:
        for dialogue in dialogues:
            while (prompt := dialogue.prompt) is not None:
                ids = store.get(prompt)
                if ids is None:
                    key = tuple(prompt)
                    if key not in asked:  # by another dialogue
                        asked[key] = group.create_task(ask(prompt))
                    ids = await asked[key]
                    asked.pop(key, None)
                dialogue.answer(ids)
            done(dialogue)

    async def main() -> None:
        async with aclosing(client.http), asyncio.TaskGroup() as group:
            for _ in range(in_flight):
                group.create_task(work(group))

    try:
        asyncio.run(main())
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
