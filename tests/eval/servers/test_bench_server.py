"""A served head measures as the same head here: tau, acceptance and texts, to the token."""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain, count
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from eval import bench, report
from eval.core.command_line import exit_status
from eval.data.prompts import Prompt, load_prompts
from eval.runtime.engine import Engine, Request
from eval.runtime.sampling_params import PENALTIES, Sampling
from eval.servers.engine_client import Answer, count_rounds
from eval.servers.openai_client import KEY_VARIABLE
from heads.targets.frozen_target import FrozenTarget
from tests.eval.conftest import Bench, PairHead
from tests.support.annotations import Capture, Patch
from tests.support.answering import QuietHandler, QuietServer
from tests.support.refusals import refused
from tests.support.small_targets import open_engine

pytestmark = pytest.mark.usefixtures("without_charts")
DEPTH, NEW, UNSENT = 3, 12, -1
Generate = Callable[[Request], list[list[int]]]
Measure = Callable[..., tuple[int, dict[str, Any]]]


class Speculating(QuietServer):
    """vLLM, SGLang or llama-server with a head. `generate` returns the tokens by round, none of them cut: `UNSENT`
    are those behind an end token."""

    def __init__(self, generate: Generate, folder: str, engine: str = "vllm") -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.generate, self.folder, self.engine = generate, folder, engine
        self.counts: Counter[str] = Counter()
        self.speculates, self.tells = True, False  # `tells`: vLLM says each answer's rounds with it
        self.thinks: Callable[[int], str] = lambda number: "text"  # the key of an answer's piece by its number
        self.waits = 0.0  # seconds before each piece
        self.tokenises, self.fails_in_stream = True, False
        self.is_noisy = False  # sampled texts are another model's
        self.drafts = DEPTH  # draft tokens that vLLM says it made in a round
        self.algorithm, self.draft_tokens = "EAGLE3", DEPTH + 1  # what SGLang says of its draft
        self.fault: Callable[[Speculating, int], int | None] = lambda server, number: None
        """Returns a status that replaces answer `number`, 0 to hang up, or None."""
        self.said = b"so"  # body of such a status
        self.asked, self.chats, self.tools = 0, list[list[dict[str, str]]](), list[Any]()
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.lock = threading.Lock()


class Handler(QuietHandler):
    server: Speculating

    def do_GET(self) -> None:
        server, name = self.server, f'{{model="{self.server.folder}",engine="0"'
        counts = server.counts
        lines = [f"vllm:generation_tokens_total{name}}} {counts['tokens']}.0"] if counts is not None else []
        if server.engine == "llamacpp":
            name = "{"
            lines = [f"vllm:tokens_predicted_total {counts['tokens']}"]
        if server.speculates and lines:
            lines.append(f"vllm:spec_decode_num_drafts_total{name}}} {counts['drafts']}.0")
            lines.append(f"vllm:spec_decode_num_draft_tokens_total{name}}} {counts['drafted']}.0")
            lines.append(f"vllm:spec_decode_num_drafts_created{name}}} 1.7e+09")
            lines += [
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{name},position="{k}"}} {counts[str(k)]}.0'
                for k in range(DEPTH if server.engine == "vllm" or counts["drafts"] else 0)
            ]
        card = {"id": "tiny", "owned_by": server.engine, "root": server.folder, "max_model_len": 128}
        info: dict[str, Any] = {"version": "9", "model_path": server.folder, "speculative_eagle_topk": 1}
        info["speculative_algorithm"] = server.algorithm if server.speculates else None
        info["speculative_num_draft_tokens"] = server.draft_tokens
        info["speculative_num_steps"] = 1 if server.algorithm == "DFLASH" else server.draft_tokens - 1
        properties: dict[str, Any] = {"build_info": "b1", "model_path": server.folder}
        properties["default_generation_settings"] = {"n_ctx": 128}
        replies = {
            "/props": json.dumps(properties),
            "/v1/models": json.dumps({"data": [card]}),
            "/version": json.dumps({"version": "9"}),
            "/server_info": json.dumps(info),
            "/metrics": "\n".join(lines).replace("vllm:", f"{server.engine}:"),
        }
        self.send(200, replies[self.path].encode())

    def do_POST(self) -> None:
        server, body = self.server, self.body()
        with server.lock:
            server.asked += 1
            if (status := server.fault(server, server.asked - 1)) is not None:
                if status:
                    self.send(status, server.said)
                return
            if "messages" in body:
                server.chats.append(body["messages"])
                server.tools.append(body.get("tools"))
            most = body.get("max_tokens") or body["n_predict"]
            penalties = {name: body.get(name, Sampling.model_fields[name].default) for name in PENALTIES}
            sampling = Sampling(temperature=body.get("temperature", 0.0), seed=body.get("seed", 0), **penalties)
            prompt = body.get("prompt") or [1, 2, 3]
            rounds = server.generate(Request([1, 2, 3] if isinstance(prompt, str) else prompt, most, sampling))
            if server.is_noisy and sampling.temperature > 0:
                rounds = [[3 + 11 * n % 90] for n in range(most)]
            length = min(sum(token != UNSENT for tokens in rounds for token in tokens), most)
            if server.engine == "llamacpp":  # it drafts no more tokens than are allowed
                rounds[-1] = rounds[-1][: len(rounds[-1]) - max(0, sum(map(len, rounds)) - most)]
            gains = [len(tokens) - 1 for tokens in rounds[1:]]
            histogram = [gains.count(n) for n in range(DEPTH + 1)]
            if server.engine != "sglang":
                server.counts.update(str(k) for gain in gains for k in range(gain))
                server.counts["drafts"] += len(gains)
                server.counts["drafted"] += server.drafts * len(gains)
                server.counts["tokens"] += length
        if server.engine == "llamacpp":
            timings = {"predicted_n": length, "predicted_ms": 1.0, "draft_n_accepted": sum(gains)}
            kinds = {"speculative.types": "draft-eagle3" if server.speculates else "none"}
            reply = {
                "content": "so",
                "tokens": [token for token in chain(*rounds) if token != UNSENT],
                "timings": timings,
                "generation_settings": kinds,
            }
            self.send(200, json.dumps(reply).encode())
            return
        left, events = length, list[dict[str, Any]]()
        for key, tokens in zip(map(server.thinks, count()), rounds, strict=False):
            piece: dict[str, Any] = {"text": "so"} if key == "text" else {"delta": {key: "so"}}
            events.append({"choices": [piece | ({"token_ids": tokens[: max(left, 0)]} if server.tokenises else {})]})
            left -= len(tokens)
        last: dict[str, Any] = {"choices": [], "usage": {"completion_tokens": length}}
        if server.engine == "sglang":
            assert body["return_spec_tokens_details"]
            last["sglext"] = {"spec_tokens_details": {"spec_correct_drafts_histogram": histogram}}
        elif server.tells:
            last["metrics"] = {"speculative_decoding": {"acceptance_histogram": histogram}}
        if server.fails_in_stream:
            events = [{"error": {"message": "min_p is not supported", "code": 400}}]
        texts = [f"data: {json.dumps(event)}\n\n".encode() for event in [*events, last]] + [b"data: [DONE]\n\n"]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for text in texts:
            time.sleep(server.waits)
            self.wfile.write(text)
        self.close_connection = True


def in_rounds(engine: Engine) -> Generate:
    """Return a function that generates as an engine with drafts does: the last round is not cut at the limit."""

    def generate(request: Request) -> list[list[int]]:
        whole = Request(request.prompt, request.max_new_tokens + DEPTH + 1, request.sampling)
        (output,) = engine.generate([whole])
        rounds, at = [output.tokens[:1]], 1
        for emitted, accepted in zip(output.emitted(), output.accepted, strict=True):
            if at < request.max_new_tokens:
                unsent = [UNSENT] * (accepted + 1 - emitted)  # behind an end token
                rounds.append(output.tokens[at : at + emitted] + unsent)
                at += emitted
        return rounds

    return generate


@pytest.fixture(scope="module")
def head(tiny_target: FrozenTarget, tiny_tokenizer: PreTrainedTokenizerBase, texts: Path) -> PairHead:
    """A head that has seen the target's answers, and so drafts many of their tokens."""
    prompts = load_prompts(str(texts), tiny_tokenizer, max_prompt_tokens=64)
    engine, head = open_engine(tiny_target, None, max_length=128), PairHead()
    head.learn([output.tokens for output in engine.generate([Request(prompt.ids, NEW) for prompt in prompts])])
    return head


@pytest.fixture
def plain(tiny_target: FrozenTarget) -> Generate:
    return in_rounds(open_engine(tiny_target, None, max_length=128))


@pytest.fixture
def served(tiny_target: FrozenTarget, tiny_target_dir: Path, head: PairHead) -> Iterator[Speculating]:
    engine = open_engine(tiny_target, head, f"chain:{DEPTH}", max_length=128)
    with Speculating(in_rounds(engine), str(tiny_target_dir)) as server:
        yield server


@pytest.fixture(scope="module")
def texts(tiny_prompts: list[Prompt], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "code.jsonl"
    records = [{"prompt": prompt.text, "category": prompt.suite} for prompt in tiny_prompts]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def measure(served: Speculating, texts: Path, tmp_path: Path) -> Measure:
    """A function that measures the server: the status, and the results in a folder of the test's."""

    def run(*options: str, out: str = "out", prompts: Path = texts) -> tuple[int, dict[str, Any]]:
        words = ["--server", served.url, "--prompts", str(prompts), "--max-new-tokens", str(NEW), "--repeats", "1"]
        status = exit_status(lambda: bench.main([*words, "--out", str(tmp_path / out), *options]))
        file = tmp_path / out / "results.json"
        return status, json.loads(file.read_text()) if file.is_file() else {}

    return run


SERVED = [(0.0, 0.0, "vllm, sglang EAGLE3, sglang DFLASH"), (0.0, 1.5, "vllm"), (1.0, 0.0, "vllm, llamacpp")]


@pytest.mark.parametrize("case", SERVED, ids=str)
def test_a_served_head_measures_as_it_does_here(
    case: Any, served: Speculating, head: PairHead, texts: Path, tmp_path: Path, bench: Bench, measure: Measure
) -> None:
    temperature, penalty, servers = case
    settings: dict[str, Any] = {"trees": (f"chain:{DEPTH}",), "max_new_tokens": NEW, "temperatures": (temperature,)}
    bench(tmp_path, head, prompts=str(texts), frequency_penalty=penalty, **settings)
    here = json.loads((tmp_path / "results.json").read_text())
    assert here["tau"]["mean"] > 1.3 or temperature or penalty
    named = ("--target", served.folder, "--temperature", str(temperature), "--frequency-penalty", str(penalty))
    audited = {"identical": None, "against": "distribution"} if temperature else {"identical": 6, "against": "runtime"}
    for server in servers.split(", "):
        served.engine, _, served.algorithm = server.partition(" ")
        status, there = measure(*named, out=f"bench/{server}")
        assert status == 0 and there["rule"] == ("server" if temperature else "match")
        assert there["dtype"] == "its own dtype" and "float32" in there["command"]
        assert (there["exact"].pop("draws") or {}).get("tokens") == (there["tokens"] if temperature else None)
        assert there["exact"] == {"prompts": 6, "divergences": [], "near_ties": []} | audited
        suites = [(there["suites"][name], own) for name, own in here["suites"].items()]
        for figures, own in ((there, here), *suites):
            for name in ("alpha", "accepted_histogram", "loop_share", "undecoded"):
                assert figures[name] == own[name] or server == "llamacpp"
            for name in ("mean", "ci95", "per_request"):
                assert figures["tau"][name] == pytest.approx(own["tau"][name])
        assert there["settings"]["prompts_hash"] == here["settings"]["prompts_hash"] and there["speedup"] is None
    assert report.main([str(tmp_path)]) == 0
    for page in (tmp_path, tmp_path / "bench" / server):
        assert "Here and in the server" in (page / "report.html").read_text()


def test_rounds_said_with_answers_are_exact_with_several_in_flight(served: Speculating, measure: Measure) -> None:
    _, one = measure()
    served.tells = True
    _, several = measure("--batch-size", "3,1", out="several")
    for found in several["measurements"]:
        assert all(found[name] == one[name] for name in ("alpha", "accepted_histogram", "tau"))
    assert one["exact"]["against"] == "nothing"


def test_a_server_that_drafts_fewer_tokens_is_told(served: Speculating, measure: Measure, capsys: Capture) -> None:
    for served.drafts in (DEPTH, DEPTH - 1):
        _, results = measure()
        assert results["drafted"] == served.drafts
        assert ("drafted fewer than 3 tokens" in capsys.readouterr().out) == (served.drafts < DEPTH)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "kept back"])
def test_reasoning_is_timed_or_no_speed_is_stated(
    key: str, served: Speculating, measure: Measure, capsys: Capture
) -> None:
    served.folder, served.tokenises, served.waits = "OWNER/ELSEWHERE", False, 0.05
    served.generate = lambda request: [[5]] * request.max_new_tokens
    served.thinks = lambda number: key if number < NEW - 1 else "content"
    status, results = measure("--num-prompts", "1")
    assert status == 0 and results["tau"]["mean"] == 1
    if key == "kept back":
        assert results["speculative"] == {"hidden": True} and results["first_token_ms"] == {}
        assert "cannot be all their tokens, such as reasoning: no speed is stated" in capsys.readouterr().out
    else:
        assert 5 < results["speculative"]["tokens_per_second"] < 20 and results["first_token_ms"]["p50"] < 500


def test_settings_that_were_compared_are_counted(served: Speculating, measure: Measure, capsys: Capture) -> None:
    assert measure("--temperature", "0,1", "--batch-size", "1,4", "--target", served.folder)[0] == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "identical to plain decoding: 12 of 12 prompts (6 prompts x 2 settings); at T = 1" in out
    assert out.count(" sampled tokens have a mean log-probability") == 2 and "too few to tell a small" in out


def test_a_plain_server_gives_speedup_and_texts(
    served: Speculating, plain: Generate, measure: Measure, tmp_path: Path
) -> None:
    with Speculating(plain, served.folder) as twin:
        twin.speculates = False
        status, results = measure("--plain-server", twin.url)
        assert status == 0 and results["speedup"]["measured"] > 0 and results["baseline"]["tokens_per_second"] > 0
        assert results["exact"]["against"] == "plain server" and results["exact"]["identical"] == 6
        twin.generate = lambda request: [[5]] * request.max_new_tokens
        _, results = measure("--plain-server", twin.url)
        assert results["exact"]["identical"] == 0
        assert "only the target here" in (tmp_path / "out/report.html").read_text()
        served.folder = twin.folder + "x"
        assert measure("--plain-server", twin.url, out="other") == (2, {})


def test_a_server_s_first_token_may_be_nearly_as_likely_as_ours(
    served: Speculating, plain: Generate, tiny_target: FrozenTarget, measure: Measure
) -> None:
    def second_best(request: Request) -> list[list[int]]:
        tokens = torch.tensor([request.prompt])
        places = torch.arange(tokens.shape[1])[None]
        hidden = tiny_target.packed_features(tokens, places, torch.zeros_like(tokens), ()).hidden[:, -1]
        token = int(tiny_target.shared.lm_head(hidden)[0].topk(2).indices[1])
        return [[token], *plain(Request([*request.prompt, token], request.max_new_tokens - 1, request.sampling))]

    served.generate = second_best
    status, results = measure("--target", served.folder)
    assert status == 1 and results["exact"]["identical"] == 0  # measured, with texts that differ


MIN_P = "--temperature 1 --min-p 0.1"
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "away": ({"url": "http://127.0.0.1:1"}, "", "/v1/models: no answer"),
    "another program": ({"engine": "ollama"}, "", "expected vLLM, SGLang or llama-server"),
    "no drafts": ({"engine": "llamacpp", "generate": lambda r: [[5]]}, "", "and drafts nothing; its log says why"),
    "noise": ({"is_noisy": True}, "--target TARGET --temperature 1", "its sampled texts are not the target's at T = 1"),
    "min_p": ({"fault": lambda s, n: 500 if n else None}, MIN_P, "vLLM takes no min_p with a draft"),
    "min_p in the stream": ({"fails_in_stream": True}, MIN_P, "vLLM takes no min_p with a draft"),
    "min_p, of a target": ({"fault": lambda s, n: 400}, f"--target TARGET {MIN_P}", "vLLM takes no min_p with a draft"),
    "no room": ({}, "--max-new-tokens 128", "leave no room for a prompt in the 128 positions"),
    "no speculation": ({"speculates": False}, "", "does not speculate"),
    "another target": ({"generate": lambda r: [[5]] * r.max_new_tokens}, "--target TARGET", "is not that of"),
    "no counters": ({"counts": None}, "", "has no counters"),
    "status 500": ({"fault": lambda s, n: 500 if n == 3 else None}, "", "status 500"),
    "hangs up": ({"fault": lambda s, n: 0 if n == 3 else None}, "", "no answer"),
    "other requests": ({"fault": lambda s, n: s.counts.update(tokens=n == 3)}, "", "measure it while it has no"),
    "rounds beyond K": ({"engine": "sglang", "draft_tokens": 2}, "", "says that it drafts 1 tokens, and accepted"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_server_that_cannot_be_measured_is_one_line_and_leaves_nothing(
    case: str, served: Speculating, measure: Measure, tmp_path: Path, capsys: Capture
) -> None:
    changes, options, words = REFUSED[case]
    vars(served).update(changes)
    out = tmp_path / "out"
    assert measure(*options.replace("TARGET", served.folder).split()) == (2, {})
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert words in line and (served.url in line or case == "no room")
    assert {path.name for path in out.glob("*")} <= {"unfinished.jsonl"} and (case != "noise" or not out.exists())


def test_the_key_is_nowhere_told(served: Speculating, measure: Measure, monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "5ec2e7")
    served.fault, served.said = lambda server, number: 400, b"x" * 197 + b"5ec2e7"
    assert measure() == (2, {})
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "(" + "x" * 197 + "...)" in line
    for option in ("--server", "--plain-server"):
        fault = refused(bench.main, [option, "http://user:5ec2e7@localhost:8000"])
        assert f"{option}: expected an address without a key" in fault


def test_without_the_tokenizer_prompts_are_messages(served: Speculating, measure: Measure, tmp_path: Path) -> None:
    served.folder = "OWNER/ELSEWHERE"
    status, results = measure()
    assert status == 0 and results["target"] == {"name": "OWNER/ELSEWHERE"}
    assert results["settings"]["distinct_prompts"] == 6
    assert served.chats and all(prompt[-1]["role"] == "user" for prompt in served.chats)
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    asked = tmp_path / "tools.jsonl"
    asked.write_text(f"{json.dumps({'turns': ['one', 'two'], 'tools': tools})}\n")
    served.tools.clear()
    assert measure(prompts=asked)[0] == 0
    assert served.tools and all(given == tools for given in served.tools)


def test_the_last_round_is_cut_where_the_answer_ends() -> None:
    # Rounds accepted 3, 1 and 2 draft tokens; of the last one's 3 tokens the limit left 1.
    answer = Answer(0.0, count=1 + 4 + 2 + 1, pieces=[(0.0, 1), (0.0, 4), (0.0, 2), (0.0, 1)])
    rounds = count_rounds(3, [3, 2, 1], [answer])
    assert (rounds.number, rounds.accepted, rounds.tested) == (3, [2, 1, 1], [2, 2, 1])
    joined = Answer(0.0, count=8, pieces=[(0.0, 1), (0.0, 4), (0.0, 3)])  # its last piece is no round
    assert count_rounds(3, [3, 2, 1], [joined]).accepted == [3, 2, 1]
    without_a_draft = Answer(0.0, count=1 + 4 + 1, pieces=[(0.0, 1), (0.0, 4), (0.0, 1)])
    assert count_rounds(1, [1, 1, 1], [without_a_draft]).number == 2
    both = Answer(0.0, count=1 + 4 + 1 + 2, pieces=[(0.0, 1), (0.0, 4), (0.0, 1), (0.0, 2)])  # cut, and one without
    assert count_rounds(2, [2, 2, 2], [both]).number == 3
