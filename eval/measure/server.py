"""Client of a running vLLM or SGLang, and what it says about its rounds.

SGLang says with each answer how many of its rounds accepted how many draft tokens, as does a vLLM that was started with
--per-request-spec-decode-metrics summary. Any vLLM counts drafts, and accepted draft tokens by position, over all
requests (/metrics).

Engines count a round's accepted draft tokens before EOS or the token limit cuts them; `metrics.counted` counts those
that came out. Where an answer comes round by round, its last round is counted as there. A round without a
draft emits one token and is in no counter of vLLM; such rounds are inferred from the tokens that no draft accounts for.

A draft that is sometimes shorter than K (prompt lookup, adaptive lengths) is tested at fewer depths than counted here,
so its alpha is a lower bound.
"""

import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import httpx
import openai

from eval.measure.command import KEY_VARIABLE, server_key, without_key
from eval.measure.prompts import Prompt
from eval.runtime.sampling_params import Sampling
from heads.core.errors import UserError, first_line

ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}
CONNECT_SECONDS, SECONDS = 10.0, 600.0
"""Time limits of a connection and of the next piece of an answer."""
LATE_SECONDS = 2.0
"""Time for which counters may lag behind the answers."""
COUNTER = re.compile(
    r"^vllm:(spec_decode_num_drafts|spec_decode_num_accepted_tokens_per_pos|generation_tokens)(?:_total)?"
    r"(?:\{(.*)\})? (\S+)$",
    re.MULTILINE,
)
POSITION = re.compile(r'position="(\d+)"')
DRAFTS, GENERATED = "spec_decode_num_drafts", "generation_tokens"


@dataclass
class Answer:
    sent: float
    tokens: list[int] = field(default_factory=list)
    """Empty if the server returns no token ids."""
    count: int = 0
    """Number of tokens."""
    text: str = ""
    pieces: list[tuple[float, int]] = field(default_factory=list)
    """Arrival and number of token ids of each piece. A piece is a round, unless the server joined several."""
    rounds: list[int] = field(default_factory=list)
    """Number of rounds by accepted draft tokens, if the server says it with the answer."""

    @property
    def decoded(self) -> int:
        return self.count - 1


@dataclass
class Rounds:
    """Rounds of one or several answers, as `metrics.counted` counts them."""

    number: int
    accepted: list[int]
    """By depth: rounds that gained at least so many draft tokens."""
    tested: list[int]
    """By depth: rounds that tested a draft token there."""


class Server:
    """A client of one server. UserError, in one line, for whatever it does not answer."""

    def __init__(self, url: str, *, plain: bool = False) -> None:
        """`plain`: it must not speculate; otherwise it must."""
        self.url = url.rstrip("/").removesuffix("/v1")
        limits, key = openai.Timeout(SECONDS, connect=CONNECT_SECONDS), server_key() or "none"
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=limits)
        models = self.get("/v1/models", object)
        try:
            (card, *_) = models["data"]
            self.model, self.engine = str(card["id"]), ENGINES[card["owned_by"]]
        except (LookupError, TypeError, ValueError):
            raise self.error(
                "expected vLLM or SGLang; give the address of one, such as http://localhost:8000"
            ) from None
        self.root = str(card.get("root") or self.model)
        self.context_length = int(card.get("max_model_len") or 2**31)
        if self.engine == "vLLM":
            self.version = str(self.get("/version", object).get("version"))
            self.depth = len([name for name in self.counters() if name.isdigit()])
        else:
            info = self.get("/server_info", object)
            self.version, self.root = str(info.get("version")), str(info.get("model_path") or self.root)
            # A tree's depth is its steps. Chains have topk 1; the steps of block kinds (DFLASH, DSPARK) are always 1.
            steps = info.get("speculative_num_steps") if (info.get("speculative_eagle_topk") or 1) > 1 else None
            depth = steps or (info.get("speculative_num_draft_tokens") or 1) - 1
            self.depth = depth if info.get("speculative_algorithm") else 0
        if plain and self.depth:
            raise self.error("--plain-server: it speculates; start it without a draft")
        if not plain and not self.depth:
            draft = "--speculative-config" if self.engine == "vLLM" else "--speculative-algorithm"
            raise self.error(f"does not speculate; start it with {draft}")

    @property
    def name(self) -> str:
        return f"{self.engine} {self.version}"

    def error(self, what: str) -> UserError:
        return UserError(f"{self.url}: {what}")

    @contextmanager
    def errors_of(self, path: str) -> Iterator[None]:
        try:
            yield
        except openai.APIStatusError as error:
            said = without_key(" ".join(error.response.text.split()))[:200]
            remedy = f"put its key in {KEY_VARIABLE}" if error.status_code in (401, 403) else "mend it"
            raise self.error(f"{path}: status {error.status_code} ({said}); {remedy}, and measure again") from None
        except (openai.APIError, httpx.HTTPError, ValueError) as error:
            why = without_key(first_line(error.__cause__ or error))
            raise self.error(f"{path}: no answer ({why}); start the server, and measure again") from None

    def get(self, path: str, form: type) -> Any:
        with self.errors_of(path):
            return self.client.get(self.url + path, cast_to=form)

    def counters(self) -> Counter[str]:
        """Return vLLM's counters, each summed over its labels: drafts, tokens generated, and by its position how often
        a draft token was accepted."""
        found: Counter[str] = Counter()
        for name, labels, value in COUNTER.findall(self.get("/metrics", str)):
            position = POSITION.search(labels)
            found[position[1] if position else name] += int(float(value))
        if GENERATED not in found:
            raise self.error("/metrics has no counters of vLLM; start it without --disable-log-stats")
        return found

    def settled(self, before: Counter[str], answers: Sequence[Answer]) -> Counter[str]:
        """Return vLLM's counters once they contain some answers, and no others, that came since `before`."""
        expected, end = before[GENERATED] + sum(answer.count for answer in answers), time.monotonic() + LATE_SECONDS
        while (now := self.counters())[GENERATED] < expected and time.monotonic() < end:
            time.sleep(0.01)
        if now[GENERATED] != expected:
            more = now[GENERATED] - expected
            raise self.error(
                f"counts {abs(more)} tokens {'more' if more > 0 else 'less'} than it sent here; measure it while it "
                "has no other requests"
            )
        return now

    def rounds_of(self, answer: Answer) -> Rounds:
        if not answer.rounds and answer.decoded:
            raise self.error("its answers do not say how many draft tokens were accepted; those of SGLang 0.5.23 do")
        if any(answer.rounds[self.depth + 1 :]):
            deepest = max(n for n, count in enumerate(answer.rounds) if count)
            raise self.error(
                f"says that it drafts {self.depth} tokens, and accepted {deepest} in a round; start it with a fixed "
                "number of draft tokens"
            )
        told = [*answer.rounds, *[0] * (self.depth + 1)][: self.depth + 1]
        accepted = list(accumulate(reversed(told[1:])))[::-1]
        return count_rounds(sum(told), accepted, [answer])

    def ask(self, prompt: Prompt, sampling: Sampling, max_new_tokens: int, stop_ids: Sequence[int] = ()) -> Answer:
        """Send a prompt, as token ids if it has them, and read the answer. All sampling parameters are sent, since
        servers take absent ones from the model's generation_config.json."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "seed": sampling.seed,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": list(stop_ids),
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.engine == "SGLang":
            body["return_spec_tokens_details"] = True
        path = "/completions" if prompt.ids else "/chat/completions"
        body |= {"prompt": list(prompt.ids)} if prompt.ids else {"messages": list(prompt.messages)}
        if prompt.arguments and not prompt.ids:
            body["chat_template_kwargs"] = dict(prompt.arguments)
        answer = Answer(sent=time.perf_counter())
        with self.errors_of(f"/v1{path}"):
            events = self.client.post(path, body=body, cast_to=object, stream=True, stream_cls=openai.Stream[object])
            for event in events:
                arrived: Any = event
                for choice in arrived.get("choices") or ():
                    text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
                    ids = choice.get("token_ids") or []
                    if ids or text:
                        answer.pieces.append((time.perf_counter(), len(ids)))
                    answer.tokens += ids
                    answer.text += text
                answer.count = (arrived.get("usage") or {}).get("completion_tokens") or answer.count
                sglang = (arrived.get("sglext") or {}).get("spec_tokens_details") or {}
                vllm = (arrived.get("metrics") or {}).get("speculative_decoding") or {}
                told = sglang.get("spec_correct_drafts_histogram") or vllm.get("acceptance_histogram")
                answer.rounds = told or answer.rounds
        if not answer.pieces or not answer.count:
            raise self.error(f"/v1{path}: an answer without a token or a count; mend the server, and measure again")
        return answer


def count_rounds(drafts: int, accepted: Sequence[int], answers: Sequence[Answer]) -> Rounds:
    """Return the rounds of some answers from an engine's counts: its drafts and, by depth, how many of them had that
    many tokens accepted. Of a single answer that came round by round, the last round is cut where the answer ends."""
    decoded, kept, tested = sum(a.decoded for a in answers), list(accepted), [drafts, *accepted[:-1]]
    over = drafts + sum(accepted) - decoded
    if len(answers) == 1 and over > 0 and len(answers[0].pieces) == 1 + drafts:
        gain = answers[0].pieces[-1][1] - 1
        last = gain + over  # draft tokens that the last round accepted
        if gain >= 0:
            kept = [n - (gain < depth <= last) for depth, n in enumerate(kept, start=1)]
            tested = [n - (gain < depth <= last + 1) for depth, n in enumerate(tested, start=1)]
    return Rounds(drafts + max(0, -over), kept, tested)
