"""The ladder between this runtime and an engine names what makes them differ. The engine is this runtime itself, with
another head, target or cache; whole engines are in tests/engines."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from eval import parity
from eval.core.command_line import exit_status
from eval.data.prompts import Prompt
from eval.runtime.engine import Engine, Request
from eval.servers.misread_heads import Cause
from eval.servers.parity_counts import Asked, Counting, EngineAnswer, Step, counted
from eval.servers.parity_ladder import Ladder, climb
from eval.servers.parity_run import other_ids
from eval.servers.rounded_target import AS_HERE, Precision, hadamard, log_probabilities, precisions, round_cache
from heads.registry import build_head
from heads.targets.frozen_target import FrozenTarget
from heads.targets.load import load_target
from tests.support.annotations import Capture, Patch
from tests.support.small_targets import make_target

ROOT = Path(__file__).resolve().parents[3]
PROMPTS = [[0, 100, 90, 80]]
NEW, DEPTH = 100, 3


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> FrozenTarget:
    return load_target(str(tiny_target_dir), dtype=torch.float32)


def eagle3(target: FrozenTarget, **settings: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return build_head("eagle3", {"depth": 3, **settings}, target, torch.ones(target.vocab_size)).float().eval()


def dflash(target: FrozenTarget, **settings: Any) -> Any:
    """A head whose layers norm their keys differently, as trained ones do."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(4)
        head: Any = build_head("dflash", settings, target, torch.ones(target.vocab_size)).float().eval()
        head.layers[1].self_attn.k_norm.weight.mul_(0.3)
        return head


def ladder(target: FrozenTarget, head: Any, **engine: Any) -> Ladder:
    return Ladder(target, head, DEPTH, "llama.cpp", PROMPTS, NEW, Asked("an engine", **engine))


def conclude(target: FrozenTarget, head: Any, answers: list[EngineAnswer], **engine: Any) -> str:
    _, answer = climb(ladder(target, head, answers=answers, **engine))
    return answer


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        ({"norm_output": True}, "the conversion: norm_output was dropped"),
        ({"fc_norm": True, "norm_output": True}, "the conversion: norm_output and fc_norm were dropped"),
        ({"sliding_window": 6}, "the conversion: sliding_window was dropped"),
        ({}, "the engine: its layers are one too deep, [3, 5, 6] for [2, 4, 5]"),
        ({"aux_layer_ids": [1, 3, 6]}, "the engine: the default layers took the place of its own"),
        ({}, "the engine: it drafts 2 tokens a round, not 3"),
        ({}, "the conversion: its weights are in 8 bits (Q8_0)"),
        ({"num_layers": 2, "block_size": 4}, "the engine: the first layer's norm of keys is applied in every layer"),
    ],
)
def test_what_reproduces_the_engines_counts_is_named(settings: Any, cause: str, target: FrozenTarget) -> None:
    head = (dflash if "block_size" in settings else eagle3)(target, **settings)
    whole = ladder(target, head)
    name = cause.partition(": ")[2]
    tried: Cause = next(each for each in whole.misreadings.causes() if each.name.startswith(name))
    theirs = whole.run(tried.head() if tried.head else None, tried.depth).counts
    own = whole.run().counts
    assert [answer.tokens for answer in theirs] == [answer.tokens for answer in own]  # no head changes a text
    assert theirs != own
    answer = conclude(target, head, theirs)
    assert answer.startswith(cause) and answer.endswith("as in the engine")


def test_the_bound_at_which_drafts_end_is_found(target: FrozenTarget) -> None:
    """Every round of the engine is asked of this runtime alone, after the text so far."""
    head, bound, new_tokens = eagle3(target), 0.15, 40
    whole = replace(ladder(target, head), new_tokens=new_tokens)
    (text,) = whole.run().texts
    head.norm.weight.data *= 4  # surer, so that some drafts end and others do not
    probabilities: list[float] = []
    new_state = head.new_state

    def spied(*arguments: Any, **named: Any) -> Any:
        state = new_state(*arguments, **named)
        state.lm_head.register_forward_hook(
            lambda _, __, z: probabilities.append(float(z.flatten(0, -2)[0].topk(10).values.softmax(-1)[0]))
        )
        return state

    head.new_state = spied
    engine = Engine(target, head, whole.options(DEPTH))
    at, rounds, drafted, by_position = 0, 0, 0, [0] * DEPTH
    while at + 1 < len(text):
        probabilities.clear()
        (output,) = engine.generate([Request([*PROMPTS[0], *text[:at]], 2 + DEPTH, ignore_eos=True)])
        sure = [p >= bound for p in probabilities[:DEPTH]]
        length = min([*sure, False].index(False), new_tokens - at - 2)
        accepted = min(output.accepted[0], length)
        rounds, drafted, at = rounds + (length > 0), drafted + length, at + accepted + 1
        by_position = [count + (position < accepted) for position, count in enumerate(by_position)]
    assert 0 < drafted < rounds * DEPTH
    del head.new_state
    whole.asked.answers = [EngineAnswer(text, rounds, drafted, sum(by_position), by_position)]
    named = r"the engine: its drafts end before a token less likely than about ([.0-9]+) .* as in the engine$"
    found = re.match(named, climb(whole)[1])
    assert found is not None and float(found[1]) == pytest.approx(bound, abs=0.02)


def test_a_draft_token_that_is_as_likely_as_another_is_called_rounding(target: FrozenTarget) -> None:
    """Two rows of the output head are equal: this runtime drafts the first token, and the engine the other."""
    head = eagle3(target)
    whole = ladder(target, head)
    (text,) = whole.run().texts
    unused = next(token for token in range(target.vocab_size) if token not in text)
    rows = head.lm_head.weight.data
    before = rows.clone()
    for token in sorted(set(text), key=text.count):
        rows.copy_(before)
        rows[unused] = (1 - 1e-4) * rows[token]
        theirs = whole.run().counts
        rows[unused] = rows[token]
        if whole.run().counts != theirs:
            break
    assert conclude(target, head, theirs).startswith("rounding: another order of its sums")


def test_every_cause_is_tried_of_every_kind_of_head(target: FrozenTarget) -> None:
    strange = EngineAnswer([], 1, 1, 1, [0, 0, 1])
    for kind, settings in (("dspark", {"block_size": 4, "markov_rank": 6}), ("draft", {"layers": [0, 7]})):
        head: Any = build_head(kind, settings, target, torch.ones(target.vocab_size)).float().eval()
        whole = replace(ladder(target, head, answers=[strange]), new_tokens=8)
        strange.tokens = whole.run().texts[0]
        assert "no known behaviour" in climb(whole)[1]


def test_an_equal_engine_is_the_heads_own_figure_and_an_unknown_one_is_called_so(target: FrozenTarget) -> None:
    head = eagle3(target)
    run = ladder(target, head).run()
    assert conclude(target, head, run.counts).startswith("the head: tau ")
    strange = [EngineAnswer(a.tokens, a.rounds, a.drafted, 1, [0, 0, 1]) for a in run.counts]
    assert "no known behaviour" in conclude(target, head, strange)
    silent = [EngineAnswer(a.tokens, 0, 0, 0, []) for a in run.counts]
    assert "it drafts nothing" in conclude(target, head, silent)
    plain = [answer.tokens for answer in run.counts]
    plain[0] = [*plain[0][:4], *[(token + 1) % 128 for token in plain[0][4:]]]
    assert "other texts on 1 prompts" in conclude(target, head, strange, plain=plain)


def steps_of(engine: Engine) -> Callable[[Sequence[int], Sequence[int]], list[Step]]:
    def steps(prompt: Sequence[int], text: Sequence[int]) -> list[Step]:
        rows = log_probabilities(engine, prompt, text)
        return [Step(int(row.argmax()), {k: float(row[k]) for k in row.topk(5).indices.tolist()}) for row in rows]

    return steps


def narrow(family: str) -> FrozenTarget:
    return make_target(family, torch.float32, head_dim=16, num_hidden_layers=8)


def rounded(target: FrozenTarget, engine: FrozenTarget, keys: str, values: str) -> tuple[Precision, str]:
    """The precision of the engine's cache, and what is concluded from its counts and probabilities."""
    whole = replace(ladder(target, eagle3(target)), prompts=[[1, 40, 50, 60]], new_tokens=40)
    precision = next(each for each in precisions("", None) if each.cache == (keys, values))
    theirs = Engine(engine, None, whole.options())
    round_cache(theirs, precision)
    if engine is target:
        whole.precision = precision
    whole.asked.answers, whole.asked.steps = whole.run().counts, steps_of(theirs)
    whole.precision = AS_HERE
    return precision, climb(whole)[1]


@pytest.mark.parametrize(("family", "cache"), [("llama", "f16 f16"), ("llama", "q8_0 q4_0"), ("olmo2", "q4_0 q4_0")])
def test_the_precision_of_an_engines_cache_is_found_from_its_probabilities(family: str, cache: str) -> None:
    """By the native decoder and by the model's own code."""
    target = narrow(family)
    precision, answer = rounded(target, target, *cache.split())
    assert precision.name in answer


def test_a_cache_whose_rounding_cannot_be_reproduced_is_named_by_the_size_of_its_differences() -> None:
    """The engine's weights differ a little, so that other values are rounded up and down."""
    other, noise = narrow("llama"), torch.Generator().manual_seed(0)
    for weight in other.model.parameters():
        weight.data *= 1 + 1e-3 * torch.randn(weight.shape, generator=noise)
    assert "4 bits (q4_0)" in rounded(narrow("llama"), other, "q4_0", "q4_0")[1]


def test_the_matrix_that_turns_cached_values_turns_them_back() -> None:
    assert torch.allclose(hadamard(64) @ hadamard(64), torch.eye(64), atol=1e-6)


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([1, 1, 5, 6], "other ids of 1 of 1 prompts: a second BOS: 2 BOS at their start, 1 here (a)"),
        ([5, 6], "0 BOS at their start, 1 here"),
        ([1, 5, 7], "others from position 2 on, 3 for 3"),
    ],
)
def test_other_ids_of_a_prompt_are_named(ids: list[int], said: str) -> None:
    prompt = Prompt("a", "suite", "", "text", (1, 5, 6), messages=({"role": "user", "content": "text"},))
    assert said in (other_ids([prompt], lambda prompt: ids, 1) or "")
    assert other_ids([prompt], lambda prompt: [1, 5, 6], 1) is None


def test_rounds_are_counted_as_engines_count_them(target: FrozenTarget) -> None:
    """llama.cpp drafts no more than an answer may still hold beside the bonus token, so that by hand: 8 tokens, the
    first by the prompt; a round of 3 accepted drafts leaves 3, of which 2 may be drafted, and so on."""
    text, made = list(range(8)), (3, 1, 3)
    clipped: Any = counted(made, text, 3, 8, Counting(clips=True))
    assert (clipped.rounds, clipped.drafted, clipped.accepted) == (2, 5, 4)
    whole: Any = counted(made, text, 3, 8, Counting())
    assert (whole.rounds, whole.drafted, whole.accepted, whole.by_position) == (3, 9, 7, [3, 2, 2])
    less: Any = counted(made, text, 3, 8, Counting(counts_last=False, by_position=False, drafted=False))
    assert (less.rounds, less.drafted, less.accepted, less.by_position) == (3, None, 4, None)


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["lookup:3", "--engine", "llama.cpp"], "lookup:3: needs no engine's reader"),
        (["lookup:3+HEAD", "--engine", "llama.cpp"], "name the head alone, HEAD"),
        (["HEAD", "--engine", "openvino", "--server", "http://x"], "--server: openvino has no server"),
        (["HEAD", "--engine", "mlx", "--engine-head", "x"], "mlx reads the folders as they are"),
        (["HEAD", "--engine", "llama.cpp", "--tree", "tree:2x2x4"], "--tree: engines draft chains here"),
        (["HEAD", "--engine", "mlx"], "mlx-lm 0.32.2 has no method for heads of kind eagle3"),
        (["HEAD", "--engine", "llama.cpp"], "error: llama.cpp b11549 is not installed here"),
        (["HEAD", "--engine", "llama.cpp", "--server", "http://127.0.0.1:1"], "no answer"),
    ],
)
def test_errors_are_one_line(
    words: list[str], fault: str, tiny_run: Path, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DRAFTSMITH_LLAMACPP_PYTHON", str(tmp_path / "none"))
    arguments = [str(tiny_run / "run") if word == "HEAD" else word for word in words]
    arguments += ["--max-new-tokens", "8", "--max-prompt-tokens", "96"]
    assert exit_status(lambda: parity.main(arguments)) == 2
    (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert fault in error


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_no_server_outlives_the_process_that_started_it(end: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text("import sys\nprint('http://here', flush=True)\nsys.stdin.read()\n")
    (tmp_path / "starter.py").write_text(
        "import sys, time\nfrom pathlib import Path\nfrom eval.servers.engine_process import running\n"
        "here = Path(sys.argv[1])\n"
        "with running(Path(sys.executable), str(here / 'server.py'), {}, what='it', folder=here) as url:\n"
        "    print(url, flush=True)\n    time.sleep(60)\n"
    )
    command = [sys.executable, str(tmp_path / "starter.py"), str(tmp_path)]
    own = {**os.environ, "PYTHONPATH": str(ROOT)}
    starter = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=own, text=True)
    with starter:
        assert starter.stdout is not None and starter.stdout.readline().strip() == "http://here"
        (server,) = psutil.Process(starter.pid).children()
        starter.send_signal(end)
        starter.wait(60)
    _, alive = psutil.wait_procs([server], timeout=10)
    assert all(process.status() == psutil.STATUS_ZOMBIE for process in alive)
