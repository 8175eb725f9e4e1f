"""Answers of a server: the target's own, many at a time, and one clear line where they are not to be had."""

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from eval.runtime.engine import Request
from eval.runtime.sampling_params import Sampling
from eval.servers.openai_client import ServerClient
from heads.core.errors import UserError
from tests.support.answering import Stub, serving
from train.core.interrupts import Interrupted, Interrupts
from train.data.answering_server import AnsweringServer, answer_by_server
from train.data.dialogues import Dialogue

EOS = 1
TOKENS = 6
TEMPLATE: Any = None
"""The chat template, which no single prompt needs."""


def made_up(request: Request) -> list[int]:
    """An answer that only follows from the prompt."""
    return [2 + (sum(request.prompt) * 7 + n) % 90 for n in range(request.max_new_tokens - 1)] + [EOS]


def ask(stub: Stub, dialogues: Sequence[Dialogue], *, in_flight: int = 64, retries: int = 0, url: str = "") -> None:
    target: Any = SimpleNamespace(vocab_size=128, eos_token_ids=(EOS,), placement="elsewhere")
    server = AnsweringServer(ServerClient(url or stub.url, retries), "tiny", target)

    def request(prompt: list[int]) -> Request:
        return Request(prompt, TOKENS, Sampling(temperature=0.5, seed=len(prompt)))

    answer_by_server(iter(enumerate(dialogues)), request, server, in_flight, lambda *_: None, lambda _: None)


def prompts(count: int) -> list[Dialogue]:
    return [Dialogue(TEMPLATE, [10 + n // 90, 10 + n % 90]) for n in range(count)]


def num_answered(dialogues: Sequence[Dialogue]) -> int:
    return sum(dialogue.prompt is None for dialogue in dialogues)


@pytest.fixture
def stub() -> Iterator[Stub]:
    with serving(Stub(made_up)) as stub:
        yield stub


def test_64_are_in_flight_and_never_more(stub: Stub) -> None:
    together = threading.Barrier(64)
    trial = threading.Event()

    def hold() -> None:
        if trial.is_set():
            together.wait(timeout=20)  # broken, where fewer come
        trial.set()

    stub.hold = hold
    dialogues = prompts(128)
    ask(stub, dialogues)
    assert stub.most_in_flight == 64 and len(stub.asked) == 1 + 128
    assert all(answer == made_up(Request(prompt, TOKENS)) for d in dialogues for prompt, answer in d.exchanges)


class Twice(Dialogue):
    def next_prompt(self) -> list[int] | None:
        ((prompt, answer),) = self.exchanges[-1:]
        return [*prompt, *answer, 6] if len(self.exchanges) < 2 else None


@pytest.mark.parametrize("speaks", ["vllm", "sglang"])
def test_a_dialogue_goes_on_from_the_servers_answers(speaks: str, stub: Stub) -> None:
    stub.speaks = speaks
    dialogue = Twice(TEMPLATE, [5])
    ask(stub, [dialogue], url=stub.url + "/v1/")
    answer = made_up(Request([5], TOKENS))
    assert [prompt for prompt, _ in dialogue.exchanges] == [[5], [5, *answer, 6]]
    trial, *later = [(len(request.prompt), request.sampling) for request in stub.asked]
    asked = [request for request in later if request[1].temperature > 0]
    assert trial[1].temperature == 0 and asked == [(n, Sampling(temperature=0.5, seed=n)) for n in (1, 8)]


def test_a_server_that_is_overloaded_or_gone_for_a_while_is_waited_for(stub: Stub) -> None:
    stub.fault = lambda number: (503, b"") if 3 < number < 6 else (200, b'{"choices": []}') if number == 6 else None
    dialogues = prompts(20)
    ask(stub, dialogues, in_flight=4, retries=4)
    assert num_answered(dialogues) == 20
    dialogues = prompts(60)
    with serving(Stub(made_up, hold=lambda: time.sleep(0.02))) as first:
        worker = threading.Thread(target=ask, args=(first, dialogues), kwargs={"in_flight": 4, "retries": 9})
        worker.start()
        while first.answered < 8:
            time.sleep(0.01)
    time.sleep(0.5)
    assert num_answered(dialogues) < 60 and worker.is_alive()
    with serving(Stub(made_up), int(first.url.rpartition(":")[2])):
        worker.join(timeout=60)
    assert num_answered(dialogues) == 60


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "text only": ({"speaks": "text"}, "gives text and no token ids"),
    "another model": ({"model": "big"}, "expected a server of tiny, it serves big"),
    "500 later": (
        {"fault": lambda n: (500, b"") if n > 4 else None},
        r"no answer in 2 trials \(status 500\); .* and run the same command again",
    ),
    "refused": (
        {"fault": lambda n: (400, b'{"error": {"message": "too\\nlong"}}')},
        r"/v1/completions: refused, status 400 \(.*too\\nlong",
    ),
    "no key": ({"key": "x"}, "status 401 .*; put its key in DRAFTSMITH_SERVER_KEY"),
    "outside the vocabulary": ({"answer": lambda _: [5, 128, 1]}, "below 128, got 128; it serves another model"),
    "broken off": ({"answer": lambda _: [5, 6]}, "an answer of 2 tokens broke off"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_server_cannot_do_is_one_line(fault: str, stub: Stub) -> None:
    changes, line = FAULTS[fault]
    vars(stub).update(changes)
    with pytest.raises(UserError, match=line) as error:
        ask(stub, prompts(20), in_flight=2, retries=1)
    assert "\n" not in str(error.value) and str(error.value).startswith(stub.url)


def test_a_signal_ends_the_asking_at_once(stub: Stub) -> None:
    ended, dialogues = threading.Event(), prompts(100)

    def hold() -> None:
        if stub.answered == 20:
            os.kill(os.getpid(), signal.SIGTERM)
            ended.wait(timeout=20)

    stub.hold = hold
    with Interrupts(), pytest.raises(Interrupted):
        ask(stub, dialogues, in_flight=1)
    ended.set()
    assert num_answered(dialogues) == 19  # beside the trial
