"""A served head measures as the same head here: tau, acceptance and texts, to the token."""

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from eval import bench, report
from eval.core.command_line import exit_status
from eval.data.prompts import Prompt, load_prompts
from eval.runtime.engine import Engine, EngineOptions, Request
from eval.runtime.sampling_params import PENALTIES, Sampling
from eval.servers.engine_client import Answer, count_rounds
from eval.servers.openai_client import KEY_VARIABLE
from heads.core.errors import UserError
from heads.core.tree import parse_shape
from heads.targets.frozen_target import FrozenTarget
from tests.eval.conftest import Bench, PairConfig, PairHead
from tests.support.answering import QuietHandler, QuietServer

pytestmark = pytest.mark.usefixtures("without_charts")
DEPTH, NEW = 3, 12


class Speculating(QuietServer):
    """vLLM or SGLang with a head. `generate` returns a request's tokens by round, and none of them is cut."""

    def __init__(self, generate: Callable[[Request], list[list[int]]], folder: str, engine: str = "vllm") -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.generate, self.folder, self.engine = generate, folder, engine
        self.counts: Counter[str] = Counter()
        self.speculates, self.tells = True, False
        """`tells`: vLLM says each answer's rounds with it."""
        self.drafts = DEPTH
        """Draft tokens that vLLM says it made in a round."""
        self.algorithm, self.draft_tokens = "EAGLE3", DEPTH + 1
        """What SGLang says of its draft."""
        self.fault: Callable[[Speculating, int], int | None] = lambda server, number: None
        """Returns a status that replaces answer `number`, 0 to hang up, or None."""
        self.said = b"so"
        """Body of such a status."""
        self.asked, self.chats = 0, list[list[dict[str, str]]]()
        self.tools: list[Any] = []
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.lock = threading.Lock()


class Handler(QuietHandler):
    server: Speculating

    def do_GET(self) -> None:
        server, name = self.server, f'{{model="{self.server.folder}",engine="0"'
        counts = server.counts
        lines = [f"vllm:generation_tokens_total{name}}} {counts['tokens']}.0"] if counts is not None else []
        if server.speculates and lines:
            lines.append(f"vllm:spec_decode_num_drafts_total{name}}} {counts['drafts']}.0")
            lines.append(f"vllm:spec_decode_num_draft_tokens_total{name}}} {counts['drafted']}.0")
            lines.append(f"vllm:spec_decode_num_drafts_created{name}}} 1.7e+09")
            lines += [
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{name},position="{k}"}} {counts[str(k)]}.0'
                for k in range(DEPTH)
            ]
        card = {"id": "tiny", "owned_by": server.engine, "root": server.folder, "max_model_len": 128}
        info: dict[str, Any] = {"version": "9", "model_path": server.folder, "speculative_eagle_topk": 1}
        info["speculative_algorithm"] = server.algorithm if server.speculates else None
        info["speculative_num_draft_tokens"] = server.draft_tokens
        info["speculative_num_steps"] = 1 if server.algorithm == "DFLASH" else server.draft_tokens - 1
        replies = {
            "/v1/models": json.dumps({"data": [card]}),
            "/version": json.dumps({"version": "9"}),
            "/server_info": json.dumps(info),
            "/metrics": "\n".join(lines) if server.engine == "vllm" else "",
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
            penalties = {name: body[name] for name in PENALTIES}
            sampling = Sampling(temperature=body["temperature"], seed=body["seed"], **penalties)
            rounds = server.generate(Request(body.get("prompt") or [1, 2, 3], body["max_tokens"], sampling))
            gains = [len(tokens) - 1 for tokens in rounds[1:]]
            length = min(sum(map(len, rounds)), body["max_tokens"])
            histogram = [gains.count(n) for n in range(DEPTH + 1)]
            if server.engine == "vllm":
                server.counts.update(str(k) for gain in gains for k in range(gain))
                server.counts["drafts"] += len(gains)
                server.counts["drafted"] += server.drafts * len(gains)
                server.counts["tokens"] += length
        left, events = body["max_tokens"], []
        for tokens in rounds:
            events.append({"choices": [{"text": "so", "token_ids": tokens[: max(left, 0)]}]})
            left -= len(tokens)
        last: dict[str, Any] = {"choices": [], "usage": {"completion_tokens": length}}
        if server.engine == "sglang":
            assert body["return_spec_tokens_details"]
            last["sglext"] = {"spec_tokens_details": {"spec_correct_drafts_histogram": histogram}}
        elif server.tells:
            last["metrics"] = {"speculative_decoding": {"acceptance_histogram": histogram}}
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in [*events, last]) + "data: [DONE]\n\n"
        self.send(200, text.encode())


def in_rounds(engine: Engine) -> Callable[[Request], list[list[int]]]:
    """Return a function that generates as an engine with drafts does: the last round is not cut at the limit."""

    def generate(request: Request) -> list[list[int]]:
        whole = Request(request.prompt, request.max_new_tokens + DEPTH + 1, request.sampling)
        (output,) = engine.generate([whole])
        rounds, at = [output.tokens[:1]], 1
        for emitted in output.emitted():
            if at < request.max_new_tokens:
                rounds.append(output.tokens[at : at + emitted])
                at += emitted
        return rounds

    return generate


@pytest.fixture(scope="module")
def head(tiny_target: FrozenTarget, tiny_tokenizer: PreTrainedTokenizerBase, texts: Path) -> PairHead:
    """A head that has seen the target's answers, and so drafts many of their tokens."""
    prompts = load_prompts(str(texts), tiny_tokenizer, max_prompt_tokens=64)
    engine, head = Engine(tiny_target, None, EngineOptions(max_length=128)), PairHead(PairConfig())
    head.learn([output.tokens for output in engine.generate([Request(prompt.ids, NEW) for prompt in prompts])])
    return head


@pytest.fixture
def served(tiny_target: FrozenTarget, tiny_target_dir: Path, head: PairHead) -> Iterator[Speculating]:
    engine = Engine(tiny_target, head, EngineOptions(shape=parse_shape(f"chain:{DEPTH}"), max_length=128))
    with Speculating(in_rounds(engine), str(tiny_target_dir)) as server:
        yield server


@pytest.fixture(scope="module")
def texts(tiny_prompts: list[Prompt], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "code.jsonl"
    records = [{"prompt": prompt.text, "category": prompt.suite} for prompt in tiny_prompts]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def measure(served: Speculating, prompts: Path, out: Path, *more: str) -> tuple[int, dict[str, Any]]:
    options = ["--server", served.url, "--prompts", str(prompts), "--max-new-tokens", str(NEW), "--repeats", "1"]
    status = exit_status(lambda: bench.main([*options, "--out", str(out), *more]))
    file = out / "results.json"
    return status, json.loads(file.read_text()) if file.is_file() else {}


@pytest.mark.parametrize(
    ("temperature", "penalty", "servers"),
    [(0.0, 0.0, ["vllm", "sglang EAGLE3", "sglang DFLASH"]), (0.0, 1.5, ["vllm"]), (1.0, 0.0, ["vllm"])],
)
def test_a_served_head_measures_as_it_does_here(
    temperature: float,
    penalty: float,
    servers: list[str],
    served: Speculating,
    head: PairHead,
    texts: Path,
    tmp_path: Path,
    bench: Bench,
    tiny_target: FrozenTarget,
) -> None:
    settings: dict[str, Any] = {"trees": (f"chain:{DEPTH}",), "max_new_tokens": NEW, "temperatures": (temperature,)}
    bench(tmp_path, head, prompts=str(texts), frequency_penalty=penalty, **settings)
    here = json.loads((tmp_path / "results.json").read_text())
    assert here["tau"]["mean"] > 1.3 or temperature or penalty
    named = ("--target", tiny_target.name, "--temperature", str(temperature), "--frequency-penalty", str(penalty))
    audited = {"identical": None, "against": "nothing"} if temperature else {"identical": 6, "against": "runtime"}
    for server in servers:
        served.engine, _, served.algorithm = server.partition(" ")
        status, there = measure(served, texts, tmp_path / "bench" / server, *named)
        assert status == 0 and there["rule"] == ("server" if temperature else "match")
        assert there["dtype"] == "its own dtype" and "float32" in there["command"]
        assert there["exact"] == {"prompts": 6, "divergences": [], "near_ties": []} | audited
        suites = [(there["suites"][name], own) for name, own in here["suites"].items()]
        for figures, own in ((there, here), *suites):
            for name in ("alpha", "accepted_histogram", "loop_share", "undecoded"):
                assert figures[name] == own[name]
            for name in ("mean", "ci95", "per_request"):
                assert figures["tau"][name] == pytest.approx(own["tau"][name])
        assert there["settings"]["prompts_hash"] == here["settings"]["prompts_hash"] and there["speedup"] is None
    assert report.main([str(tmp_path)]) == 0
    for page in (tmp_path, tmp_path / "bench" / servers[-1]):
        assert "Here and in the server" in (page / "report.html").read_text()


def test_rounds_said_with_answers_are_exact_with_several_in_flight(
    served: Speculating, texts: Path, tmp_path: Path
) -> None:
    _, one = measure(served, texts, tmp_path / "one")
    served.tells = True
    _, several = measure(served, texts, tmp_path / "several", "--batch-size", "3,1")
    first, second = several["measurements"]
    for name in ("alpha", "accepted_histogram"):
        assert first[name] == second[name] == one[name]
    assert first["tau"] == second["tau"] == one["tau"] and one["exact"]["against"] == "nothing"


def test_a_server_that_drafts_fewer_tokens_by_its_own_rule_is_told(
    served: Speculating, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for drafts in (DEPTH, DEPTH - 1):
        served.drafts = drafts
        _, results = measure(served, texts, tmp_path / str(drafts))
        assert results["drafted"] == drafts
        assert ("drafted fewer than 3 tokens" in capsys.readouterr().out) == (drafts < DEPTH)


def test_a_plain_server_gives_speedup_and_texts(
    served: Speculating, tiny_target: FrozenTarget, texts: Path, tmp_path: Path
) -> None:
    with Speculating(in_rounds(Engine(tiny_target, None, EngineOptions(max_length=128))), served.folder) as twin:
        twin.speculates = False
        status, results = measure(served, texts, tmp_path / "a", "--plain-server", twin.url)
        assert status == 0 and results["speedup"]["measured"] > 0 and results["baseline"]["tokens_per_second"] > 0
        assert results["exact"]["against"] == "plain server" and results["exact"]["identical"] == 6
        twin.generate = lambda request: [[5]] * request.max_new_tokens
        _, results = measure(served, texts, tmp_path / "b", "--plain-server", twin.url)
        assert results["exact"]["identical"] == 0
        assert "only the target here" in (tmp_path / "b/report.html").read_text()
        served.folder = twin.folder + "x"
        assert measure(served, texts, tmp_path / "c", "--plain-server", twin.url) == (2, {})


def test_a_server_s_first_token_may_be_nearly_as_likely_as_the_targets(
    served: Speculating, tiny_target: FrozenTarget, texts: Path, tmp_path: Path
) -> None:
    plainly = in_rounds(Engine(tiny_target, None, EngineOptions(max_length=128)))

    def second_best(request: Request) -> list[list[int]]:
        tokens = torch.tensor([request.prompt])
        places = torch.arange(tokens.shape[1])[None]
        hidden = tiny_target.packed_features(tokens, places, torch.zeros_like(tokens), ()).hidden[:, -1]
        token = int(tiny_target.shared.lm_head(hidden)[0].topk(2).indices[1])
        return [[token], *plainly(Request([*request.prompt, token], request.max_new_tokens - 1, request.sampling))]

    served.generate = second_best
    status, results = measure(served, texts, tmp_path, "--target", tiny_target.name)
    assert status == 1 and results["exact"]["identical"] == 0  # measured, with texts that differ


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "away": ({"url": "http://127.0.0.1:1"}, "/v1/models: no answer"),
    "another program": ({"engine": "llamacpp"}, "expected vLLM or SGLang"),
    "no speculation": ({"speculates": False}, "does not speculate"),
    "another target": ({"generate": lambda request: [[5]] * request.max_new_tokens}, "is not that of"),
    "no counters": ({"counts": None}, "has no counters"),
    "status 500": ({"fault": lambda s, n: 500 if n == 3 else None}, "status 500"),
    "hangs up": ({"fault": lambda s, n: 0 if n == 3 else None}, "no answer"),
    "other requests": ({"fault": lambda s, n: s.counts.update(tokens=n == 3)}, "measure it while it has no"),
    "rounds beyond K": ({"engine": "sglang", "draft_tokens": 2}, "says that it drafts 1 tokens, and accepted"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_server_that_cannot_be_measured_is_one_line_and_leaves_nothing(
    case: str,
    served: Speculating,
    texts: Path,
    tmp_path: Path,
    tiny_target: FrozenTarget,
    capsys: pytest.CaptureFixture[str],
) -> None:
    changes, words = REFUSED[case]
    vars(served).update(changes)
    out = tmp_path / "out"
    named = ("--target", tiny_target.name) if case == "another target" else ()
    assert measure(served, texts, out, *named) == (2, {})
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert words in line and served.url in line and not out.exists()


def test_the_key_is_nowhere_told(
    served: Speculating,
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "5ec2e7")
    served.fault, served.said = lambda server, number: 400, b"x" * 197 + b"5ec2e7"
    assert measure(served, texts, tmp_path / "out") == (2, {})
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "(" + "x" * 197 + "...)" in line
    for option in ("--server", "--plain-server"):
        with pytest.raises(UserError, match=f"{option}: expected an address without a key"):
            bench.main([option, "http://user:5ec2e7@localhost:8000"])


def test_without_the_tokenizer_prompts_are_messages(served: Speculating, texts: Path, tmp_path: Path) -> None:
    served.folder = "OWNER/ELSEWHERE"
    status, results = measure(served, texts, tmp_path)
    assert status == 0 and results["target"] == {"name": "OWNER/ELSEWHERE"}
    assert results["settings"]["distinct_prompts"] == 6
    assert all(isinstance(prompt, list) and prompt[-1]["role"] == "user" for prompt in served.chats) and served.chats
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    asked = tmp_path / "tools.jsonl"
    asked.write_text(f"{json.dumps({'turns': ['one', 'two'], 'tools': tools})}\n")
    served.tools.clear()
    assert (
        measure(served, asked, tmp_path / "out")[0] == 0
        and served.tools
        and all(given == tools for given in served.tools)
    )


def test_the_last_round_is_cut_where_the_answer_ends() -> None:
    # Rounds accepted 3, 1 and 2 draft tokens; of the last one's 3 tokens the limit left 1.
    answer = Answer(0.0, count=1 + 4 + 2 + 1, pieces=[(0.0, 1), (0.0, 4), (0.0, 2), (0.0, 1)])
    rounds = count_rounds(3, [3, 2, 1], [answer])
    assert (rounds.number, rounds.accepted, rounds.tested) == (3, [2, 1, 1], [2, 2, 1])
    joined = Answer(0.0, count=8, pieces=[(0.0, 1), (0.0, 4), (0.0, 3)])  # its last piece is no round
    assert count_rounds(3, [3, 2, 1], [joined]).accepted == [3, 2, 1]
    without_a_draft = Answer(0.0, count=1 + 4 + 1, pieces=[(0.0, 1), (0.0, 4), (0.0, 1)])
    assert count_rounds(1, [1, 1, 1], [without_a_draft]).number == 2
