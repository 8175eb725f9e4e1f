"""Runs on answers of a server: killed, gone on with in another number of processes, and on another day."""

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path

import pytest

from heads.targets.load import load_target
from tests.conftest import CHAT_TEMPLATE
from tests.support.answering import Stub, by_engine, serving
from tests.support.chats import talk, write_chats
from tests.support.processes import ROOT, finish, launcher, start
from tests.support.runs import Settings, same, train, weights, write_recipe

pytestmark = pytest.mark.slow

TWO = launcher("--multi_gpu", "--num_processes", "2", "--main_process_port", "0")
ONE = launcher("--num_processes", "1")
SCRIPT = ROOT / "scripts/regenerate.py"


@pytest.fixture
def recipe(settings: Settings, tmp_path: Path, own_cache: Path) -> Path:
    """A recipe on the answers to every turn of conversations."""
    records = ({"messages": talk(*(f"the sea {n} {k}" for k in range(4)))} for n in range(200))
    regenerate = {"prompts": 200, "prompt_tokens": 64, "new_tokens": 8, "temperature": 0.7}
    sources = [write_chats(tmp_path / "chats.jsonl", records)]
    settings["data"] = {"sources": sources, "context_length": 96, "regenerate": regenerate}
    return write_recipe(settings)


@pytest.fixture
def stub(tiny_target_dir: Path) -> Iterator[Stub]:
    with serving(Stub(by_engine(load_target(str(tiny_target_dir))), model=str(tiny_target_dir))) as stub:
        yield stub


def test_another_number_of_processes_goes_on_after_a_kill(recipe: Path, stub: Stub, tmp_path: Path) -> None:
    server = f"data.regenerate.server={{url: {stub.url}}}"
    killed = start(recipe, server, launcher=TWO, script=SCRIPT)
    while stub.answered < 80:
        assert killed.poll() is None, killed.communicate()[0]
        time.sleep(0.01)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    while stub.in_flight:
        time.sleep(0.01)
    asked = [request for request in stub.asked if request.sampling.temperature > 0]
    stub.asked.clear()
    finish(start(recipe, server, launcher=ONE, script=SCRIPT))
    again = {tuple(request.prompt) for request in stub.asked} & {tuple(request.prompt) for request in asked}
    assert len(again) <= 2 * 64 + 2  # the turns of what was in flight, and the trial of each process
    answers = (tmp_path / "run/answers.jsonl").read_text().splitlines()
    assert len(answers) == 200
    stub.asked.clear()
    for count, processes in enumerate((ONE, TWO)):
        finish(start(recipe, server, f"output_dir={tmp_path}/{count}", launcher=processes, script=SCRIPT))
        assert (tmp_path / f"{count}/answers.jsonl").read_text().splitlines() == answers
    train(recipe, server, "head.depth=3")  # another head
    assert not stub.asked


DATED = (
    "{%- if not date_string is defined %}{%- set date_string = strftime_now('%d %b %Y') %}{%- endif %}"
    "{{ date_string }}" + CHAT_TEMPLATE
)
"""A template with the day in it, which an argument can fix, as Llama 3.1's has it."""


@pytest.fixture
def days_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], date]]:
    """Lets a test move the local clock to some days after the day in Greenwich, which it is given."""

    def move(days: int) -> date:
        monkeypatch.setenv("TZ", f"DAY-{24 * days}")
        time.tzset()
        return date.today()

    yield move
    monkeypatch.undo()
    time.tzset()


def test_a_day_on_no_answer_is_made_anew(
    recipe: Path, stub: Stub, tmp_path: Path, days_on: Callable[[int], date]
) -> None:
    """By the run itself, by another folder that is given its day, and by a recipe that states it."""
    (tmp_path / "dated.jinja").write_text(DATED)
    source = f"{{kind: chat, path: {tmp_path}/chats.jsonl, chat_template: {tmp_path}/dated.jinja}}"
    settings = [f"data.regenerate.server={{url: {stub.url}}}", f"data.sources=[{source}]", "data.regenerate.prompts=20"]

    def asked(*overrides: str) -> int:
        stub.asked.clear()
        train(recipe, *settings, *overrides)
        return len(stub.asked)

    run, first = tmp_path / "run", days_on(0)
    assert asked() >= 20
    whole = weights(run, 6)
    for step in (4, 6):
        shutil.rmtree(run / f"checkpoints/step-{step}")
    assert (days_on(1) - first).days == 1
    assert asked() == 0
    assert same(weights(run, 6), whole)
    (tmp_path / "second").mkdir()
    shutil.copy(run / "data.json", tmp_path / "second")
    assert asked(f"output_dir={tmp_path}/second", "head.depth=3") == 0
    assert asked(f"output_dir={tmp_path}/third", f"data.template.date_string={first:%d %b %Y}") == 0
    assert asked(f"output_dir={tmp_path}/fourth") >= 20  # it saw the new day
