"""A client of one server with OpenAI's protocol, which answers, hidden states and measurements are requested with."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from eval.runtime.sampling_params import PENALTIES, Sampling
from heads.core.errors import UserError, first_line, shown

KEY_VARIABLE = "DRAFTSMITH_SERVER_KEY"
"""Name of the environment variable with the key of a server."""
RETRIES = 90
"""Retries of a request while the server is unreachable or overloaded: about ten minutes, at most 8 seconds apart."""
CONNECT_SECONDS = 10.0
TAKE_IT = "let it take such requests"
"""What to do if a server refuses a request."""
MAX_SHOWN = 200
"""Characters of a server's own error that are shown."""


def check_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError("expected an address such as http://localhost:8000")
    if "@" in parts.netloc or parts.query:
        raise UserError(f"expected an address without a key; put the key in the environment, as {KEY_VARIABLE}")
    return url


def server_key() -> str:
    return os.environ.get(KEY_VARIABLE, "").strip()


def without_key(text: str) -> str:
    """Return a server's words without its key. They are cut after this, since part of a key would not be found."""
    key = server_key()
    return text.replace(key, "...") if key else text


class ServerClient:
    """A client of one server, in one event loop. It does not limit the number of concurrent requests. Requests raise
    UserError if they are refused, or fail in all trials."""

    def __init__(self, url: str, retries: int = RETRIES) -> None:
        from openai import AsyncOpenAI

        self.url = url.rstrip("/").removesuffix("/v1")
        self.checking = asyncio.Lock()
        """A lock for the time in which the server is checked."""
        self._openai = AsyncOpenAI(base_url=f"{self.url}/v1", api_key=server_key() or "none", max_retries=retries)

    async def aclose(self) -> None:
        await self._openai.close()

    def error(self, what: str) -> UserError:
        return UserError(f"{self.url}: {what}")

    async def models(self) -> list[dict[str, Any]]:
        """Return the cards of the models on the server, each with its name as `id`. They are requested once."""
        reply = await self.send("/v1/models", retries=0)
        try:
            return [{**card, "id": str(card["id"])} for card in reply["data"]]
        except (LookupError, TypeError):
            raise self.error(f"/v1/models lists no models, but {shown(reply)}; start the server, or fix it") from None

    async def send(
        self,
        path: str,
        body: object = None,
        seconds: float = 60.0,
        retries: int | None = None,
        reply: type = object,
        remedy: str = TAKE_IT,
    ) -> Any:
        """Return the server's reply to a POST of `body`, or to a GET without it, within `seconds` a trial: its JSON, or
        its text with `reply=str`. `remedy`: what to do if it refuses the request."""
        client = self._openai if retries is None else self._openai.with_options(max_retries=retries)
        options = _limit(seconds)
        with self._errors(path, client.max_retries + 1, remedy):
            if body is None:
                return await client.get(self.url + path, cast_to=reply, options=options)
            return await client.post(self.url + path, cast_to=reply, body=body, options=options)

    async def stream(self, path: str, body: object, seconds: float, remedy: str = TAKE_IT) -> AsyncIterator[Any]:
        """Yield the events of the server's reply to a POST of `body`. The next one must come within `seconds`."""
        from openai import AsyncStream

        with self._errors(path, self._openai.max_retries + 1, remedy):
            stream = AsyncStream[object]
            events = await self._openai.post(
                self.url + path, cast_to=object, body=body, options=_limit(seconds), stream=True, stream_cls=stream
            )
            async for event in events:
                yield event

    @contextmanager
    def _errors(self, path: str, trials: int, remedy: str) -> Iterator[None]:
        """Turn the errors of a request into UserError."""
        import httpx
        import openai

        try:
            yield
            return
        except openai.APIStatusError as error:
            status = error.status_code
            reason = without_key(" ".join(error.response.text.split()))[:MAX_SHOWN]
            if status in (404, 405):
                raise self.error(
                    f"status {status} of {path}; give the server's own address, such as http://localhost:8000"
                ) from None
            if (status < 500 and status not in (408, 409, 429)) or remedy != TAKE_IT:
                remedy = f"put its key in {KEY_VARIABLE}" if status in (401, 403) else remedy
                raise self.error(f"{path}: refused, status {status} ({reason}); {remedy}") from None
            fault = f"status {status}"
        except (openai.APIError, httpx.HTTPError) as error:
            fault = first_line(error.__cause__ or error)
            code = str(error.code or "4") if type(error) is openai.APIError else None  # in the stream of a reply
            if code is not None and (remedy != TAKE_IT or not code.startswith("5")):
                raise self.error(f"{path}: refused ({without_key(fault)[:MAX_SHOWN]}); {remedy}") from None
        except ValueError as error:
            fault = f"it gives no JSON: {first_line(error)}"
        raise self.error(
            f"{path}: no answer in {trials} trials ({without_key(fault)}); start the server, or fix it, and run the "
            "same command again"
        )


def sampling_parameters(sampling: Sampling, stop_ids: Sequence[int]) -> dict[str, object]:
    """Return all sampling parameters of a request but the seed, since servers take absent ones from the model's
    generation_config.json."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        **dict(zip(PENALTIES, sampling.penalties, strict=True)),
        "stop_token_ids": list(stop_ids),
    }


def _limit(seconds: float) -> Any:
    import openai

    return {"timeout": openai.Timeout(seconds, connect=CONNECT_SECONDS)}
