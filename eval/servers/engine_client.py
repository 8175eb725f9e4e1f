"""A client of a running vLLM, SGLang or llama-server that speculates, and what the engine says about its rounds.

SGLang says with each answer how many of its rounds accepted how many draft tokens, as does a vLLM that was started with
--per-request-spec-decode-metrics summary. Any vLLM, and a llama-server with --metrics, counts drafts, and accepted
draft tokens by position, over all requests (/metrics).

Engines count a round's accepted draft tokens before EOS or the token limit cuts them; `metrics.counted` counts those
that came out. Where an answer comes round by round, its last round is counted as there. A round without a
draft emits one token and is in no counter of these two; such rounds are inferred from the tokens that no draft
accounts for.

A draft that is sometimes shorter than K (prompt lookup, adaptive lengths) is tested at fewer depths than counted here,
so its alpha is a lower bound.
"""

import asyncio
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Self

from eval.data.prompts import Prompt
from eval.runtime.sampling_params import Sampling
from eval.servers.openai_client import TAKE_IT, ServerClient, sampling_parameters
from eval.servers.served_texts import CHECKED_TOKENS, foreign_token
from heads.core.errors import UserError
from heads.targets.frozen_target import FrozenTarget

ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama.cpp"}
DRAFT_OPTIONS = {
    "vLLM": "--speculative-config",
    "SGLang": "--speculative-algorithm",
    "llama.cpp": "--spec-type and -md",
}
SECONDS = 600.0
"""Time limit of the next piece of an answer."""
LATE_SECONDS = 2.0
"""Time for which counters may lag behind the answers."""
COUNTER = re.compile(
    r"^(?:vllm|llamacpp):(spec_decode_num_drafts|spec_decode_num_draft_tokens|spec_decode_num_accepted_tokens_per_pos|"
    r"generation_tokens|tokens_predicted)(?:_total)?(?:\{(.*)\})? (\S+)$",
    re.MULTILINE,
)
POSITION = re.compile(r'position="(\d+)"')
DRAFTS = "spec_decode_num_drafts"
DRAFTED = "spec_decode_num_draft_tokens"
GENERATED = {"vLLM": "generation_tokens", "llama.cpp": "tokens_predicted"}
"""Counter of generated tokens of the engines that count over all requests."""
SIX_DIGITS = 1_000_000
"""Number from which llama-server prints a counter rounded."""
REPETITIVE = "one two three one two three one two three one two"
"""Prompt after which any kind of draft drafts something."""


@dataclass
class Answer:
    sent: float
    tokens: list[int] = field(default_factory=list)
    """Empty if the server returns no token ids."""
    count: int = 0
    """Number of tokens."""
    text: str = ""
    """Without reasoning that the server sends apart."""
    pieces: list[tuple[float, int]] = field(default_factory=list)
    """Arrival and number of token ids of each piece. A piece is a round, unless the server joined several."""
    is_timed: bool = True
    """False if the pieces cannot be all tokens: the server keeps some back, and their times are not known."""
    rounds: list[int] = field(default_factory=list)
    """Number of rounds by accepted draft tokens, if the server says it with the answer."""
    accepted: int = 0
    """Accepted draft tokens, if llama-server says it with the answer."""

    @property
    def decoded(self) -> int:
        return self.count - 1


@dataclass
class RoundCounts:
    """Rounds of one or several answers, as `metrics.counted` counts them."""

    number: int
    accepted: list[int]
    """By depth: rounds that gained at least so many draft tokens."""
    tested: list[int]
    """By depth: rounds that tested a draft token there."""
    drafted: int | None = None
    """Draft tokens of all rounds, if the server counts them."""


@dataclass
class EngineServer:
    client: ServerClient
    engine: str
    """A name of `ENGINES`."""
    model: str
    root: str
    """Path or Hub id of the target, as the server names it."""
    context_length: int
    version: str = ""
    depth: int = 0
    """Number of draft tokens in a round; 0 for a server that does not speculate."""
    properties: dict[str, object] = field(default_factory=dict)
    """What a llama-server says of its model (/props, and `meta` of its card)."""

    @classmethod
    async def open(cls, url: str) -> Self:
        client = ServerClient(url, retries=0)
        models = await client.models()
        engine = ENGINES.get(models[0].get("owned_by", "")) if models else None
        if engine is None:
            raise client.error(
                "expected vLLM, SGLang or llama-server; give the address of one, such as http://localhost:8000"
            )
        card = models[0]
        root, context_length = str(card.get("root") or card["id"]), int(card.get("max_model_len") or 2**31)
        server = cls(client, engine, card["id"], root, context_length)
        if engine == "vLLM":
            server.version = str((await client.send("/version")).get("version"))
            server.depth = len([name for name in await server.counters() if name.isdigit()])
        elif engine == "SGLang":
            info = await client.send("/server_info")
            server.version = str(info.get("version"))
            server.root = str(info.get("model_path") or server.root)
            # A tree's depth is its steps. Chains have topk 1; the steps of block kinds (DFLASH, DSPARK) are always 1.
            steps = info.get("speculative_num_steps") if (info.get("speculative_eagle_topk") or 1) > 1 else None
            if info.get("speculative_algorithm"):
                server.depth = steps or (info.get("speculative_num_draft_tokens") or 1) - 1
        else:
            await server.open_llamacpp(card.get("meta") or {})
        return server

    async def open_llamacpp(self, meta: dict[str, object]) -> None:
        """Read the properties of a llama-server. Newer builds say how they draft with an answer only, and all count
        drafts by position only after the first."""
        properties = self.properties = meta | await self.client.send("/props")
        defaults = properties.get("default_generation_settings") or {}
        self.version = str(properties.get("build_info"))
        self.root = str(properties.get("model_path") or self.root)
        self.context_length = int(defaults.get("n_ctx") or self.context_length)
        reply = await self.client.send("/completion", {"prompt": REPETITIVE, "n_predict": CHECKED_TOKENS}, SECONDS)
        settings = (defaults.get("params") or {}, reply.get("generation_settings") or {})
        said = [part.get("speculative.types") for part in settings]
        kinds = next((kinds for kinds in said if kinds not in (None, "none")), None)
        if kinds is None:
            return
        self.depth = len([name for name in await self.counters() if name.isdigit()])
        if not self.depth:
            raise self.error(
                f"was started with a draft ({kinds}) and drafts nothing; its log says why: it ignores a draft model of "
                "another tokenizer, for example"
            )

    @property
    def url(self) -> str:
        return self.client.url

    @property
    def name(self) -> str:
        return f"{self.engine} {self.version}"

    def error(self, what: str) -> UserError:
        return self.client.error(what)

    def need_draft(self) -> None:
        if not self.depth:
            raise self.error(f"does not speculate; start it with {DRAFT_OPTIONS[self.engine]}")

    async def counters(self) -> Counter[str]:
        """Return the server's counters, each summed over its labels: drafts, tokens generated, and by its position how
        often a draft token was accepted."""
        counters: Counter[str] = Counter()
        vllm = self.engine == "vLLM"
        remedy = TAKE_IT if vllm else "start llama-server with --metrics"
        for name, labels, value in COUNTER.findall(await self.client.send("/metrics", reply=str, remedy=remedy)):
            position = POSITION.search(labels)
            counters[position[1] if position else name] += int(float(value))
        if GENERATED[self.engine] not in counters:
            option = "without --disable-log-stats" if vllm else "with --metrics"
            raise self.error(f"/metrics has no counters of {self.engine}; start it {option}")
        if not vllm and max(counters.values()) >= SIX_DIGITS:
            raise self.error("prints its counters with six digits, and has counted more; start it anew")
        return counters

    async def counters_after(self, before: Counter[str], answers: Sequence[Answer]) -> Counter[str]:
        """Return the server's counters once they contain some answers, and no others, that came since `before`."""
        generated = GENERATED[self.engine]
        expected = before[generated] + sum(answer.count for answer in answers)
        end = time.monotonic() + LATE_SECONDS
        while (now := await self.counters())[generated] < expected and time.monotonic() < end:
            await asyncio.sleep(0.01)
        if now[generated] != expected:
            more = now[generated] - expected
            raise self.error(
                f"counts {abs(more)} tokens {'more' if more > 0 else 'less'} than it sent here; measure it while it "
                "has no other requests"
            )
        return now

    def rounds_of(self, answer: Answer) -> RoundCounts:
        if not answer.rounds and answer.decoded:
            raise self.error("its answers do not say how many draft tokens were accepted; those of SGLang 0.5.23 do")
        if any(answer.rounds[self.depth + 1 :]):
            deepest = max(n for n, count in enumerate(answer.rounds) if count)
            raise self.error(
                f"says that it drafts {self.depth} tokens, and accepted {deepest} in a round; start it with a fixed "
                "number of draft tokens"
            )
        histogram = [*answer.rounds, *[0] * (self.depth + 1)][: self.depth + 1]
        accepted = list(accumulate(reversed(histogram[1:])))[::-1]
        return count_rounds(sum(histogram), accepted, [answer])

    async def ask(
        self, prompt: Prompt, sampling: Sampling, max_new_tokens: int, stop_ids: Sequence[int] = ()
    ) -> Answer:
        """Send a prompt, as token ids if it has them, and read the answer."""
        if self.engine == "llama.cpp":
            return await self._ask_llamacpp(prompt, sampling, max_new_tokens)
        remedy = TAKE_IT
        if self.engine == "vLLM" and self.depth and sampling.min_p:
            remedy = (
                "vLLM takes no min_p with a draft, so no such figure can be served: measure without it (give "
                "--temperature and the other filters, without --min-p and --sampling)"
            )
        body: dict[str, object] = {
            "model": self.model,
            "max_tokens": max_new_tokens,
            "seed": sampling.seed,
            **sampling_parameters(sampling, stop_ids),
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.engine == "SGLang":
            body["return_spec_tokens_details"] = True
        path = "/v1/completions" if prompt.ids else "/v1/chat/completions"
        body |= {"prompt": list(prompt.ids)} if prompt.ids else chat_body(prompt)
        answer = Answer(sent=time.perf_counter())
        async for event in self.client.stream(path, body, SECONDS, remedy):
            for choice in event.get("choices") or ():
                delta = choice.get("delta") or {}
                text = choice.get("text") or delta.get("content") or ""
                thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
                ids = choice.get("token_ids") or []
                if ids or text or thought:
                    answer.pieces.append((time.perf_counter(), len(ids)))
                answer.tokens += ids
                answer.text += text
            answer.count = (event.get("usage") or {}).get("completion_tokens") or answer.count
            sglang = (event.get("sglext") or {}).get("spec_tokens_details") or {}
            vllm = (event.get("metrics") or {}).get("speculative_decoding") or {}
            histogram = sglang.get("spec_correct_drafts_histogram") or vllm.get("acceptance_histogram")
            answer.rounds = histogram or answer.rounds
        if not answer.count:
            raise self.error(f"{path}: an answer without a token or a count; fix the server, and measure again")
        most = len(answer.tokens) if answer.tokens else len(answer.pieces) * (self.depth + 1)
        answer.is_timed = most >= answer.count
        if len(answer.tokens) != answer.count:  # some were kept back: the others are no text
            answer.tokens = []
        answer.pieces = answer.pieces or [(time.perf_counter(), 0)]
        return answer

    async def _ask_llamacpp(self, prompt: Prompt, sampling: Sampling, max_new_tokens: int) -> Answer:
        """A stream of llama-server lacks the ids of tokens inside a character. So the whole answer is read at once, and
        its times are those that the server says: of the first token, and of the others together."""
        if sampling.presence_penalty or sampling.frequency_penalty:
            raise self.error(
                "llama.cpp counts the tokens of the prompt, too, in presence_penalty and frequency_penalty; leave them "
                "out"
            )
        body: dict[str, object] = {
            "model": self.model,
            "n_predict": max_new_tokens,
            "seed": sampling.seed,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repeat_penalty": sampling.repetition_penalty,
            "repeat_last_n": min(self.context_length, 2**31 - 1),  # all
            "samplers": ["penalties", "temperature", "top_k", "top_p", "min_p"],  # it would cool what the filters left
            "return_tokens": True,
            "cache_prompt": False,
        }
        path = "/completion" if prompt.ids else "/v1/chat/completions"
        body |= {"prompt": list(prompt.ids)} if prompt.ids else chat_body(prompt)
        sent = time.perf_counter()
        reply = await self.client.send(path, body, SECONDS)
        now = time.perf_counter()
        timings = reply.get("timings") or {}
        if not timings.get("predicted_n"):
            raise self.error(f"{path}: an answer without a token or a count; fix the server, and measure again")
        answer = Answer(sent, reply.get("tokens") or [], timings["predicted_n"])
        answer.accepted = timings.get("draft_n_accepted", 0)
        answer.text = (
            reply.get("content") or ((reply.get("choices") or [{}])[0].get("message") or {}).get("content") or ""
        )
        first = now - 1e-3 * timings["predicted_ms"]
        answer.pieces = [(first, 1), (now, answer.decoded)] if answer.decoded else [(first, 1)]
        return answer

    async def check_target(self, target: FrozenTarget, prompt: Prompt, min_p: float = 0.0) -> None:
        """Raise UserError if its greedy answer cannot be the target's: its figures would be another model's. `min_p`:
        that of the requests to come, which changes no greedy answer; a server that takes none refuses this one."""
        sampling = Sampling(min_p=min_p)
        tokens = (await self.ask(prompt, sampling, CHECKED_TOKENS, target.eos_token_ids)).tokens
        if not tokens:  # the server returns text alone
            return
        foreign = "it has tokens that the target has not"
        if max(tokens) < target.vocab_size:
            if (fault := foreign_token(target, prompt.ids, tokens)) is None:
                return
            foreign = fault
        raise self.error(
            f"serves {self.root}, whose greedy answer is not that of {target.name} ({foreign}); name its own target, "
            "or serve the same weights"
        )


def chat_body(prompt: Prompt) -> dict[str, object]:
    body: dict[str, object] = {"messages": list(prompt.messages)}
    if prompt.arguments:
        body["chat_template_kwargs"] = dict(prompt.arguments)
    if prompt.tools:
        body["tools"] = list(prompt.tools)
    return body


def count_rounds(drafts: int, accepted: Sequence[int], answers: Sequence[Answer]) -> RoundCounts:
    """Return the rounds of some answers from an engine's counts: its drafts and, by depth, how many of them had that
    many tokens accepted. Of a single answer that came round by round, the last round is cut where the answer ends."""
    decoded = sum(answer.decoded for answer in answers)
    gained, tested = list(accepted), [drafts, *accepted[:-1]]
    over = drafts + sum(accepted) - decoded
    if len(answers) == 1 and over > 0 and len(answers[0].pieces) == 1 + drafts:
        gain = answers[0].pieces[-1][1] - 1
        last = gain + over  # draft tokens that the last round accepted
        if gain >= 0:
            gained = [n - (gain < depth <= last) for depth, n in enumerate(gained, start=1)]
            tested = [n - (gain < depth <= last + 1) for depth, n in enumerate(tested, start=1)]
    number = drafts + max(0, -over)
    # Drafts beyond the end of an answer count as accepted, so rounds without a draft would be missing. vLLM sends the
    # tokens of a round together, or those of several.
    complete = [answer for answer in answers if sum(count for _, count in answer.pieces) == answer.decoded + 1]
    if any(count > 1 for answer in complete for _, count in answer.pieces):
        number = max(number, sum(len(answer.pieces) - 1 for answer in complete))
    return RoundCounts(number, gained, tested)
