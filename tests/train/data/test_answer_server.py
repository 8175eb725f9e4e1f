"""Answers of a server: the target's own, many at a time, and one clear line where they are not to be had."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from eval.runtime.engine import Request
from eval.runtime.sampling import Sampling
from heads.errors import UserError
from tests.answering import Stub, serving
from train.data.answer_server import Client, answer_by_server
from train.data.answer_store import AnswerStore
from train.data.dialogues import Dialogue, Prompts, lone
from train.data.settings import Server
from train.http_client import HTTPClient
from train.interrupts import Interrupted, Interrupts
from train.strict_yaml import KEY_VARIABLE

EOS = 1
TOKENS = 6


def made_up(request: Request) -> list[int]:
    """An answer that only follows from the prompt."""
    return [2 + (sum(request.prompt) * 7 + n) % 90 for n in range(request.max_new_tokens - 1)] + [EOS]


def ask(
    stub: Stub,
    dialogues: Sequence[Dialogue],
    folder: Path,
    *,
    in_flight: int = 64,
    patience: float = 0.0,
    said: list[str] | None = None,
    **settings: Any,
) -> None:
    """Have the stub answer dialogues into a folder."""
    server = Server(url=settings.pop("url", stub.url), in_flight=in_flight, **settings)
    lines: list[str] = [] if said is None else said
    client = Client(
        HTTPClient(server.url, lines.append, patience), server.model or "tiny", 128, (EOS,), lambda *_: None
    )
    with AnswerStore(folder, lines.append, 0) as store:
        store.read()
        answer_by_server(
            iter(dialogues),
            store,
            lambda prompt: Request(prompt, TOKENS, Sampling(0.5, seed=len(prompt))),
            client,
            in_flight,
            lambda dialogue: None,
        )


def prompts(count: int) -> list[Dialogue]:
    return [Dialogue(lone([10 + n // 90, 10 + n % 90])) for n in range(count)]


def kept(folder: Path) -> int:
    """The number of answers in a folder."""
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


def test_each_request_brings_its_own_sampling(stub: Stub, tmp_path: Path) -> None:
    ask(stub, [Dialogue(lone([9] * n)) for n in (2, 3)], tmp_path, in_flight=1)
    trial, first, second = stub.asked
    assert trial.sampling.temperature == 0
    assert (first.sampling, second.sampling) == (Sampling(0.5, seed=2), Sampling(0.5, seed=3))


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
    asked = [request.prompt for request in stub.asked if request.sampling.temperature > 0]
    assert alike[0].exchanges == alike[1].exchanges and len(asked) == 2  # alike prompts are asked once


@pytest.mark.parametrize("status", [503, 429])
def test_an_overloaded_server_is_asked_again(status: int, stub: Stub, tmp_path: Path) -> None:
    said: list[str] = []
    stub.fault = lambda number: (status, b"") if 3 < number < 8 else None
    ask(stub, prompts(20), tmp_path, in_flight=4, patience=30, said=said)
    assert said == [f"{stub.url}: status {status}; trying on for 30 s"] and kept(tmp_path) == 20


def test_a_server_that_is_gone_for_a_while_is_waited_for(stub: Stub, tmp_path: Path) -> None:
    said: list[str] = []
    with serving(Stub(made_up, hold=lambda: time.sleep(0.02))) as first:
        settings = {"in_flight": 4, "patience": 30, "said": said}
        worker = threading.Thread(target=ask, args=(first, prompts(60), tmp_path), kwargs=settings)
        worker.start()
        while first.answered < 8:
            time.sleep(0.01)
    time.sleep(0.5)
    assert kept(tmp_path) < 60 and worker.is_alive()
    with serving(Stub(made_up), int(first.url.rpartition(":")[2])):
        worker.join(timeout=30)
    assert len(said) == 1 and "; trying on for 30 s" in said[0] and kept(tmp_path) == 60


FAULTS: dict[str, tuple[Callable[[Stub], None], str]] = {
    "text only": (lambda stub: setattr(stub, "speaks", "text"), "gives text and no token ids"),
    "another model": (lambda stub: setattr(stub, "model", "big"), "expected a server of tiny, it serves big"),
    "500": (lambda stub: setattr(stub, "fault", lambda n: (500, b"")), "status 500; start the server"),
    "no JSON": (lambda stub: setattr(stub, "fault", lambda n: (200, b"<html>")), "gives no JSON, but '<html>'"),
    "500 later": (
        lambda stub: setattr(stub, "fault", lambda n: (500, b"") if n > 4 else None),
        r"no answer in 1 s of trials \(status 500\); mend the server, and the same command goes on",
    ),
    "no JSON later": (
        lambda stub: setattr(stub, "fault", lambda n: (200, b'{"choi') if n > 4 else None),
        "gives no JSON, but",
    ),
    "refused": (
        lambda stub: setattr(stub, "fault", lambda n: (400, b'{"error": {"message": "too\\nlong"}}')),
        r"/v1/completions: refused, status 400 \(.*too\\nlong",
    ),
    "no key": (lambda stub: setattr(stub, "key", "x"), "status 401 .*; put its key in DRAFTSMITH_SERVER_KEY"),
    "outside the vocabulary": (
        lambda stub: setattr(stub, "answer", lambda request: [5, 128, 1]),
        "expected token ids below 128, got 128; it serves another model",
    ),
    "broken off": (lambda stub: setattr(stub, "answer", lambda request: [5, 6]), "an answer of 2 tokens broke off"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_server_cannot_do_is_one_line(fault: str, stub: Stub, tmp_path: Path) -> None:
    spoil, line = FAULTS[fault]
    spoil(stub)
    with pytest.raises(UserError, match=line) as error:
        ask(stub, prompts(20), tmp_path, in_flight=2, patience=1.0)
    assert "\n" not in str(error.value) and str(error.value).startswith(stub.url)


def test_a_server_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"http://127.0.0.1:9: .*; start the server, or mend it, and begin again"):
        ask(Stub(made_up, url="http://127.0.0.1:9"), prompts(3), tmp_path, patience=60)


def test_the_key_is_sent_and_nowhere_told(stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub.key = "5ec2e7"
    monkeypatch.setenv(KEY_VARIABLE, stub.key)
    said: list[str] = []
    stub.fault = lambda number: (429, b"") if number == 2 else None
    ask(stub, prompts(5), tmp_path, in_flight=1, patience=10, said=said)
    assert said and not any(stub.key in line for line in said)
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
