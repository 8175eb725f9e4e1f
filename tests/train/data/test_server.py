"""Answers of a server: the target's own, many at a time, and one clear line where they are not to be had."""

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from eval.measure.server import KEY_VARIABLE, ServerClient
from eval.runtime.engine import Request
from eval.runtime.sampling_params import Sampling
from heads.core.errors import UserError
from tests.answering import Stub, serving
from train.core.interrupts import Interrupted, Interrupts
from train.data.chats import Dialogue, Prompts, lone
from train.data.corpus import AnswerStore
from train.data.server import AnsweringServer, answer_by_server

EOS = 1
TOKENS = 6


def made_up(request: Request) -> list[int]:
    """An answer that only follows from the prompt."""
    return [2 + (sum(request.prompt) * 7 + n) % 90 for n in range(request.max_new_tokens - 1)] + [EOS]


def ask(
    stub: Stub, dialogues: Sequence[Dialogue], folder: Path, *, in_flight: int = 64, retries: int = 0, url: str = ""
) -> None:
    server = AnsweringServer(ServerClient(url or stub.url, retries), "tiny", 128, (EOS,), lambda *_: None)

    def request(prompt: list[int]) -> Request:
        return Request(prompt, TOKENS, Sampling(0.5, seed=len(prompt)))

    with AnswerStore(folder, print, 0) as store:
        store.read()
        answer_by_server(iter(dialogues), store, request, server, in_flight, lambda dialogue: None)


def prompts(count: int) -> list[Dialogue]:
    return [Dialogue(lone([10 + n // 90, 10 + n % 90])) for n in range(count)]


def kept(folder: Path) -> int:
    with AnswerStore(folder, print) as store:
        store.read()
        return len(store)


@pytest.fixture
def stub() -> Iterator[Stub]:
    with serving(Stub(made_up)) as stub:
        yield stub


def test_64_are_in_flight_and_never_more(stub: Stub, tmp_path: Path) -> None:
    together = threading.Barrier(64)
    trial = threading.Event()

    def hold() -> None:
        if trial.is_set():
            together.wait(timeout=20)  # broken, where fewer come
        trial.set()

    stub.hold = hold
    dialogues = prompts(128)
    ask(stub, dialogues, tmp_path)
    assert stub.most_in_flight == 64 and len(stub.asked) == 1 + 128
    assert all(answer == made_up(Request(prompt, TOKENS)) for d in dialogues for prompt, answer in d.exchanges)


@pytest.mark.parametrize("speaks", ["vllm", "sglang"])
def test_a_dialogue_goes_on_from_the_servers_answers(speaks: str, tmp_path: Path, stub: Stub) -> None:
    def turns() -> Prompts:
        first = yield [5]
        second = yield [5, *first, 6]
        assert second[-1] == EOS
        return None

    stub.speaks = speaks
    alike = [Dialogue(turns()) for _ in range(3)]
    ask(stub, alike, tmp_path, url=stub.url + "/v1/")
    answer = made_up(Request([5], TOKENS))
    assert [prompt for prompt, _ in alike[0].exchanges] == [[5], [5, *answer, 6]]
    trial, *later = [(len(request.prompt), request.sampling) for request in stub.asked]
    asked = [request for request in later if request[1].temperature > 0]
    assert alike[0].exchanges == alike[1].exchanges and trial[1].temperature == 0
    assert asked == [(n, Sampling(0.5, seed=n)) for n in (1, 8)]  # alike prompts are asked once


def test_a_server_that_is_overloaded_or_gone_for_a_while_is_waited_for(stub: Stub, tmp_path: Path) -> None:
    stub.fault = lambda number: (503, b"") if 3 < number < 6 else (200, b'{"choices": []}') if number == 6 else None
    ask(stub, prompts(20), tmp_path, in_flight=4, retries=4)
    assert kept(tmp_path) == 20
    with serving(Stub(made_up, hold=lambda: time.sleep(0.02))) as first:
        worker = threading.Thread(
            target=ask, args=(first, prompts(60), tmp_path / "b"), kwargs={"in_flight": 4, "retries": 9}
        )
        worker.start()
        while first.answered < 8:
            time.sleep(0.01)
    time.sleep(0.5)
    assert kept(tmp_path / "b") < 60 and worker.is_alive()
    with serving(Stub(made_up), int(first.url.rpartition(":")[2])):
        worker.join(timeout=60)
    assert kept(tmp_path / "b") == 60


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "text only": ({"speaks": "text"}, "gives text and no token ids"),
    "another model": ({"model": "big"}, "expected a server of tiny, it serves big"),
    "500": ({"fault": lambda n: (500, b"")}, r"no answer in 1 trials \(status 500\); start the server"),
    "no JSON": ({"fault": lambda n: (200, b"<html>")}, "gives no JSON"),
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
def test_what_a_server_cannot_do_is_one_line(fault: str, stub: Stub, tmp_path: Path) -> None:
    changes, line = FAULTS[fault]
    vars(stub).update(changes)
    with pytest.raises(UserError, match=line) as error:
        ask(stub, prompts(20), tmp_path, in_flight=2, retries=1)
    assert "\n" not in str(error.value) and str(error.value).startswith(stub.url)


def test_a_server_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"http://127.0.0.1:9: /v1/models: no answer in 1 trials .*; start the server"):
        ask(Stub(made_up, url="http://127.0.0.1:9"), prompts(3), tmp_path, retries=60)


def test_the_key_is_sent_and_nowhere_told(
    stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stub.key = "5ec2e7"
    monkeypatch.setenv(KEY_VARIABLE, stub.key)
    stub.fault = lambda number: (429, b"") if number == 2 else (400, b"your key is 5ec2e7") if number == 5 else None
    with caplog.at_level(logging.DEBUG), pytest.raises(UserError, match=r"status 400 \(your key is \.\.\.\)"):
        ask(stub, prompts(5), tmp_path, in_flight=1, retries=2)
    assert caplog.records and stub.key not in caplog.text
    assert not any(stub.key.encode() in path.read_bytes() for path in tmp_path.iterdir())


def test_a_signal_ends_the_asking_at_once(stub: Stub, tmp_path: Path) -> None:
    ended = threading.Event()

    def hold() -> None:
        if stub.answered == 20:
            os.kill(os.getpid(), signal.SIGTERM)
            ended.wait(timeout=20)

    stub.hold = hold
    with Interrupts(), pytest.raises(Interrupted):
        ask(stub, prompts(100), tmp_path, in_flight=1)
    ended.set()
    assert kept(tmp_path) == 19  # beside the trial
