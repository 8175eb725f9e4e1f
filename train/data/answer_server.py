"""A server that answers in the target's place: vLLM, SGLang, or another that takes and gives token ids over HTTP.

Prompts are sent as token ids and answers taken as token ids: text that is tokenised anew may have other tokens than the
model wrote. vLLM gives them from `/v1/completions` where `return_token_ids` is set, SGLang from `/generate`.
"""

import asyncio
import json
import math
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import aiohttp
from pydantic import AfterValidator

from heads.errors import UserError, first_line, shown
from train.data.answer_store import AnswerStore
from train.data.dialogues import Dialogue
from train.strict_yaml import Count, Name, Settings

if TYPE_CHECKING:
    from eval.runtime.request import Request

KEY_VARIABLE = "DRAFTSMITH_SERVER_KEY"
PATIENCE = 600.0
"""Seconds for which a request is tried anew where the server is away or overloaded."""
FIRST_DELAY, LONGEST_DELAY = 0.25, 30.0
"""Seconds before the second trial, and before any."""
QUIET = 60.0
"""Seconds in which no further fault is said."""
CONNECT_SECONDS = 10.0
SLOWEST = 1.0
"""Seconds for a token, beside a minute for the answer, after which an answer is given up."""
CHECKED_TOKENS = 16
"""Tokens of the greedy answer by which a server is checked."""

Check = Callable[[Sequence[int], Sequence[int]], str | None]
"""The fault of a greedy answer, by prompt and answer."""


def _check_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("expected an address such as http://localhost:8000")
    if "@" in parts.netloc or parts.query:
        raise ValueError(f"expected an address without a key; put the key in the environment, as {KEY_VARIABLE}")
    return url


class Server(Settings):
    """A server that answers by OpenAI's protocol, with token ids: vLLM or SGLang. A key, if it wants one, is read from
    the environment, DRAFTSMITH_SERVER_KEY."""

    url: Annotated[Name, AfterValidator(_check_url)]
    """Its address, such as `http://localhost:8000`."""
    model: Name | None = None
    """Name of the target there. Null: `target.path`."""
    in_flight: Count = 64
    """Prompts that are with the server at a time, over all processes."""


@dataclass(frozen=True)
class Protocol:
    """A way to send token ids and to get them back."""

    path: str
    body: Callable[[str, "Request", Sequence[int]], dict[str, Any]]
    """Of the model's name there, a request, and the tokens that end an answer."""
    ids: Callable[[Any], Any]
    """The answer's tokens in a reply; LookupError or TypeError for none."""


def _completions(model: str, request: "Request", eos_token_ids: Sequence[int]) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": list(request.prompt),
        "max_tokens": request.max_new_tokens,
        "return_token_ids": True,
        "seed": request.sampling.seed,
        **_sampling(request, eos_token_ids, top_k=0),
    }


def _generate(model: str, request: "Request", eos_token_ids: Sequence[int]) -> dict[str, Any]:
    sampling = _sampling(request, eos_token_ids, top_k=-1)
    length = {"max_new_tokens": request.max_new_tokens, "sampling_seed": request.sampling.seed}
    return {"input_ids": list(request.prompt), "sampling_params": sampling | length}


def _sampling(request: "Request", eos_token_ids: Sequence[int], *, top_k: int) -> dict[str, Any]:
    """The target's own distribution. All is named: servers fill in what the model's generation_config.json says."""
    return {
        "temperature": request.sampling.temperature,
        "top_p": 1.0,
        "top_k": top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": list(eos_token_ids),
    }


PROTOCOLS = (
    Protocol("/v1/completions", _completions, lambda reply: reply["choices"][0]["token_ids"]),
    Protocol("/generate", _generate, lambda reply: reply["output_ids"]),
)


class _Fault(Exception):
    """A failure of one trial that another may not have."""


class _NoIds(_Fault):
    """A reply without token ids, or no such path."""


@dataclass
class Client:
    """Requests to a server, for the life of an event loop."""

    settings: Server
    model: str
    vocab_size: int
    eos_token_ids: Sequence[int]
    check: Check
    say: Callable[[str], None]
    patience: float = PATIENCE
    protocol: Protocol | None = None
    """None until the server is checked."""
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _said: float = -math.inf
    """When a fault was last said."""

    async def __aenter__(self) -> "Client":
        key = os.environ.get(KEY_VARIABLE, "").strip()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        connector = aiohttp.TCPConnector(limit=self.settings.in_flight)
        self.session = aiohttp.ClientSession(headers=headers, connector=connector)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()

    @property
    def url(self) -> str:
        return self.settings.url.rstrip("/").removesuffix("/v1")

    async def answer(self, request: "Request") -> list[int]:
        """The answer to a request. UserError where the server will not give one, or has none for `patience` seconds."""
        async with self._lock:
            protocol = self.protocol = self.protocol or await self._check_server(request)
        failing, delay = math.inf, FIRST_DELAY
        while True:
            try:
                return await self._ask(protocol, request)
            except _Fault as fault:
                now = time.monotonic()
                failing = min(failing, now)
                if now - failing + delay > self.patience:
                    raise UserError(
                        f"{self.url}: no answer in {self.patience:.0f} s of trials ({fault}); mend the server, and the "
                        "same command goes on"
                    ) from None
                if now - self._said > QUIET:
                    self.say(f"{self.url}: {fault}; trying on for {self.patience:.0f} s")
                    self._said = now
                await asyncio.sleep(delay * random.uniform(0.5, 1))
                delay = min(2 * delay, LONGEST_DELAY)

    async def _check_server(self, request: "Request") -> Protocol:
        """Find the protocol of a server that is there and has the target, by an answer that is not kept."""
        trial = replace(
            request,
            max_new_tokens=min(request.max_new_tokens, CHECKED_TOKENS),
            sampling=replace(request.sampling, temperature=0.0),
        )
        try:
            models = _models(await self._send("GET", "/v1/models"))
            if self.model not in models:
                raise UserError(
                    f"{self.url}: expected a server of {self.model}, it serves {', '.join(models) or 'nothing'}; name "
                    "the target there with data.regenerate.server.model, or serve it"
                )
            for protocol in PROTOCOLS:
                with suppress(_NoIds):
                    ids = await self._ask(protocol, trial)
                    if fault := self.check(trial.prompt, ids):
                        raise UserError(f"{self.url}: {fault}")
                    return protocol
        except _Fault as fault:
            raise UserError(f"{self.url}: {fault}; start the server, or mend it, and begin again") from None
        raise UserError(
            f"{self.url}: gives text and no token ids, neither from /v1/completions nor from /generate; text may be "
            "tokenised otherwise than it was written; use vLLM or SGLang"
        )

    async def _ask(self, protocol: Protocol, request: "Request") -> list[int]:
        reply = await self._send(
            "POST", protocol.path, protocol.body(self.model, request, self.eos_token_ids), request.max_new_tokens
        )
        try:
            ids = protocol.ids(reply)
        except (LookupError, TypeError):
            ids = None
        if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
            raise _NoIds(f"{protocol.path} gives no token ids")
        if not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise UserError(
                f"{self.url}: expected token ids below {self.vocab_size}, got {max(ids, key=abs)}; it serves another "
                "model than the target"
            )
        if len(ids) != request.max_new_tokens and ids[-1] not in self.eos_token_ids:
            raise _Fault(f"an answer of {len(ids)} tokens broke off")
        return ids

    async def _send(self, method: str, path: str, body: Any = None, num_tokens: int = 0) -> Any:
        """The JSON that a request gives. _Fault for what may pass, UserError for what will not."""
        timeout = aiohttp.ClientTimeout(total=60 + SLOWEST * num_tokens, sock_connect=CONNECT_SECONDS)
        try:
            async with self.session.request(
                method, self.url + path, json=body, timeout=timeout, allow_redirects=False
            ) as reply:
                text = await reply.read()
        except TimeoutError:
            raise _Fault("no reply in time") from None
        except aiohttp.ClientConnectorError:
            raise _Fault("no connection") from None
        except (aiohttp.ClientError, OSError) as error:
            raise _Fault(first_line(error)) from None
        if reply.status == 429 or reply.status >= 500:
            raise _Fault(f"status {reply.status}")
        if reply.status in (404, 405):
            raise _NoIds(f"status {reply.status} of {path}")
        if reply.status != 200:
            what = f"put its key in {KEY_VARIABLE}" if reply.status in (401, 403) else "let it take such requests"
            raise UserError(f"{self.url}{path}: refused, status {reply.status} ({_message(text)}); {what}")
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise _Fault(f"{path} gives no JSON, but {shown(text[:80].decode(errors='replace'))}") from None


def _models(reply: Any) -> list[str]:
    """The names in a list of models."""
    try:
        return [str(model["id"]) for model in reply["data"]]
    except (LookupError, TypeError):
        raise _Fault(f"/v1/models lists no models, but {shown(reply)}") from None


def _message(text: bytes) -> str:
    """The words of a refusal, in a line."""
    try:
        reply = json.loads(text)
        error = reply.get("error", reply)
        said = error.get("message", error) if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        said = text.decode(errors="replace")
    return " ".join(str(said).split())[:200] or "without a word"


def answer_by_server(
    dialogues: Iterator[Dialogue],
    store: AnswerStore,
    request_of: Callable[[list[int]], "Request"],
    client: Client,
    in_flight: int,
    done: Callable[[Dialogue], None],
) -> None:
    """Have the server answer the dialogues, `in_flight` at a time, and keep the answers."""
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
        async with client, asyncio.TaskGroup() as group:
            for _ in range(in_flight):
                group.create_task(work(group))

    try:
        asyncio.run(main())
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
