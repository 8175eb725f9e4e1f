"""A client for servers with OpenAI's protocol, which give a target's answers or features."""

import asyncio
import json
import math
import os
import random
import time
from collections.abc import Awaitable, Callable
from functools import cached_property
from typing import Any, TypeVar

import aiohttp

from heads.errors import UserError, first_line, logger, shown
from train.strict_yaml import KEY_VARIABLE

PATIENCE = 600.0
"""Seconds for which a request is retried if the server is unreachable or overloaded."""
FIRST_DELAY, LONGEST_DELAY = 0.25, 30.0
"""Seconds of delay before the first retry, and the maximum delay."""
QUIET = 60.0
"""Seconds after a reported fault in which no further fault is reported."""
CONNECT_SECONDS = 10.0

T = TypeVar("T")


class Fault(Exception):
    """A failure of one request that a retry may not have."""


class Missing(Fault):
    """A path that the server does not have and has never answered. A retry will not find it."""


class HTTPClient:
    """A client for one server, in one event loop. It does not limit the number of concurrent requests."""

    def __init__(self, url: str, say: Callable[[str], object] = logger.warning, patience: float = PATIENCE) -> None:
        """`say` reports faults that are retried, at most one in `QUIET` seconds."""
        self.url, self.say, self.patience = url.rstrip("/").removesuffix("/v1"), say, patience
        self.checking = asyncio.Lock()
        """A lock for the time in which the server is checked."""
        self._said = -math.inf
        self._answered: set[str] = set()
        """Paths that the server has answered. If one is missing later, for example behind a gateway, it is retried."""

    @cached_property
    def _session(self) -> aiohttp.ClientSession:
        key = os.environ.get(KEY_VARIABLE, "").strip()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=0))

    async def aclose(self) -> None:
        """Close all connections."""
        await self._session.close()

    def error(self, what: str) -> UserError:
        """Return an error that names the server."""
        return UserError(f"{self.url}: {what}")

    async def patiently(self, trial: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `trial`, which is retried while it raises a Fault. UserError after `patience` seconds,
        and at once for a path that is Missing."""
        failing, delay = math.inf, FIRST_DELAY
        while True:
            try:
                return await trial()
            except Missing as missing:
                raise self.error(f"{missing}; give the server's own address, such as http://localhost:8000") from None
            except Fault as fault:
                now = time.monotonic()
                failing = min(failing, now)
                if now - failing + delay > self.patience:
                    raise self.error(
                        f"no answer in {self.patience:.0f} s of trials ({fault}); mend the server, and the same "
                        "command goes on"
                    ) from None
                if now - self._said > QUIET:
                    self.say(f"{self.url}: {fault}; trying on for {self.patience - (now - failing):.0f} s")
                    self._said = now
                await asyncio.sleep(delay * random.uniform(0.5, 1))
                delay = min(2 * delay, LONGEST_DELAY)

    async def models(self) -> list[str]:
        """Return the names of the models on the server."""
        reply = await self.send("/v1/models")
        try:
            names = [str(model["id"]) for model in reply["data"]]
        except (LookupError, TypeError):
            names = []
        if not names:
            raise Fault(f"/v1/models lists no models, but {shown(reply)}")
        return names

    async def send(self, path: str, body: Any = None, seconds: float = 60.0) -> Any:
        """Return the server's JSON reply to a POST of `body`, or to a GET without it, within `seconds`. Fault for
        temporary failures, UserError for permanent ones."""
        method, address = "GET" if body is None else "POST", self.url + path
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS)
        given: Any = {"json": body, "timeout": timeout, "allow_redirects": False}
        try:
            async with self._session.request(method, address, **given) as reply:
                text = await reply.text(errors="replace")
        except (aiohttp.ClientError, OSError) as error:
            raise Fault(first_line(error)) from None
        status = reply.status
        if status in (404, 405):
            raise (Fault if path in self._answered else Missing)(f"status {status} of {path}")
        if status in (408, 429) or status >= 500:
            raise Fault(f"status {status}")
        if status != 200:
            what = f"put its key in {KEY_VARIABLE}" if status in (401, 403) else "let it take such requests"
            raise self.error(f"{path}: refused, status {status} ({' '.join(text.split())[:300]}); {what}")
        self._answered.add(path)
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise Fault(f"{path} gives no JSON, but {shown(text)}") from None
