"""The target's own answers: what the runtime gives, asked for once for all heads and any number of processes."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from eval.runtime.engine import Engine, EngineOptions, Request
from heads.core.errors import UserError
from heads.core.files import lock
from heads.targets.frozen_target import FrozenTarget
from heads.targets.load import load_target
from tests.conftest import CHAT_TEMPLATE
from tests.support.annotations import Capture, Patch
from tests.support.answering import Stub, by_engine, serving
from tests.support.chats import reader_of, talk, write_chats
from tests.support.faults import small_files
from tests.support.refusals import refused
from tests.support.runs import Settings, same, train, weights, write_recipe
from train.data.answers import TargetAnswers, describe_cut, open_answers
from train.data.data_settings import Data
from train.data.tokenise import read_source

pytestmark = pytest.mark.usefixtures("own_cache")

WORDS = ["the sea", "ten birds", "a stone", "the sand", "there", "read on", "so", "no end"]


@pytest.fixture
def asked(monkeypatch: Patch) -> list[Request]:
    """Requests that engines were given."""
    noted: list[Request] = []

    def note(request: Request) -> Request:
        noted.append(request)
        return request

    class Noting(Engine):
        def generate(self, requests: Any, **options: Any) -> Any:
            return super().generate(map(note, requests), **options)

    monkeypatch.setattr("train.data.answers.Engine", Noting)
    return noted


Make = Callable[..., TargetAnswers]


@pytest.fixture
def make(target: FrozenTarget, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Make:
    """settings of `data.regenerate` -> the answers of the tiny target to short conversations."""

    def make(*, turns: int = 2, seed: int = 0, **settings: Any) -> TargetAnswers:
        said = ([f"{WORDS[n % 8]} {n // 8} {turn // 2}" for turn in range(2 * turns)] for n in range(20))
        source = write_chats(tmp_path / f"chats-{turns}.jsonl", ({"messages": talk(*texts)} for texts in said))
        regenerate = {"prompts": 20, "prompt_tokens": 64, "new_tokens": 6, "batch_size": 2, **settings}
        data = Data.model_validate({"sources": [source], "regenerate": regenerate})
        return open_answers(data, seed, target, reader_of(tokenizer))

    return make


def records(answers: TargetAnswers) -> list[dict[str, Any]]:
    return [json.loads(line) for line in answers.lines()]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_are_the_targets_to_every_turn(
    temperature: float, make: Make, target: FrozenTarget, tmp_path: Path
) -> None:
    answers = make(turns=3, temperature=temperature)
    corpus = answers.corpus()
    found = records(answers)
    pairs = [pair for record in found for pair in record["exchanges"]]
    requests = [answers.request(prompt) for prompt, _ in pairs]
    outputs = Engine(target, None, EngineOptions(max_length=80, batch_size=8)).generate(requests)
    assert [output.tokens for output in outputs] == [answer for _, answer in pairs]
    assert len({request.sampling.seed for request in requests}) == len({tuple(r.prompt) for r in requests})
    assert len(found) == 20 and max(len(record["exchanges"]) for record in found) == 3
    labels = [token for document in corpus for token in document.ids[document.labels].tolist()]
    assert labels == [token for _, answer in pairs for token in answer]
    # The file is also a source of conversations.
    path = tmp_path / "answers.jsonl"
    path.write_bytes(b"".join(answers.lines()))
    source = Data.model_validate({"sources": [{"kind": "chat", "path": str(path)}]}).sources[0]
    read = read_source(source, "data.sources.0", answers.reader)
    assert read.tally.forms == {"exchanges": 20} and read.digest == corpus.digest


def test_conversations_that_end_early_are_counted(make: Make) -> None:
    tally = make(turns=3, prompt_tokens=40).corpus().tally
    line = describe_cut(tally)
    assert tally.records == 20 and 0 < sum(tally.skipped.values()) < 20
    assert "of 20 conversations end early: " in line and " before a prompt of more than 40 tokens" in line


def test_another_head_asks_for_nothing(
    make: Make, asked: list[Request], own_cache: Path, target: FrozenTarget, monkeypatch: Patch
) -> None:
    corpus = make().corpus()
    assert len(asked) >= 20
    asked.clear()
    assert make(batch_size=1, share=0.5, seed=1).corpus().digest == corpus.digest
    trained = make(train_on_prompts=True).corpus()  # documents of its own, from the same answers
    assert trained.num_labels > corpus.num_labels
    assert not asked
    make(new_tokens=7).corpus()
    assert asked and len(list((own_cache / "answers").iterdir())) == 2
    asked.clear()
    often = int(corpus.counts[1].argmax())
    monkeypatch.setattr(target, "eos_token_ids", (*target.eos_token_ids, often))  # of an edited generation_config.json
    assert make().corpus().digest != corpus.digest
    assert asked


def test_an_interruption_loses_the_conversations_in_flight(
    make: Make, asked: list[Request], monkeypatch: Patch
) -> None:
    """And a file cut anywhere loses only the line that was being written."""
    answers = make(turns=1)
    seven = Mock(side_effect=[*[None] * 6, KeyboardInterrupt])
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("train.data.answers.Progress.advance", seven)
        answers.generate()
    asked.clear()
    answers.generate()
    assert len(asked) == 20 - 7
    path = answers.folder / "0.jsonl"
    whole, asked[:] = path.read_bytes(), []
    path.write_bytes(whole[:-9])
    assert "lacks 1 of 20 answers; the same command generates them" in refused(lambda: list(answers.lines()))
    answers.generate()
    assert len(asked) == 1 and path.read_bytes() == whole
    asked.clear()
    path.write_bytes(whole.replace(b'{"messages"', b"messages", 1))  # a damaged line
    answers.generate()
    assert len(asked) == 1 and len(records(answers)) == 20
    path.write_bytes(whole[:-9])
    with small_files(len(whole) - 9), pytest.raises(UserError, match="cannot be written to"):
        answers.generate()
    with path.open("ab") as file, pytest.raises(UserError, match="another run generates these answers"):
        assert lock(file.fileno())
        answers.generate()


def test_a_run_that_answers_again_says_what_changed(make: Make, target: FrozenTarget, monkeypatch: Patch) -> None:
    said: list[str] = []

    def generate(**settings: Any) -> list[str]:
        said.clear()
        answers = make(turns=1, **settings)
        replace(answers, reader=replace(answers.reader, say=said.append)).generate()
        return [line for line in said if "earlier answers" in line]

    line = "data.regenerate: earlier answers are not used: "
    assert generate() == generate() == []
    assert generate(new_tokens=5) == [f"{line}new_tokens was 6, is 5"] and generate(new_tokens=5) == []
    monkeypatch.setitem(target.settings, "rms_norm_eps", 0.25)
    was = "its default" if "rms_norm_eps" not in target.settings else ""
    (changed,) = generate(new_tokens=5)
    assert changed.startswith(f"{line}config.json: rms_norm_eps was {was}") and changed.endswith("is 0.25")


def test_processes_divide_the_conversations(make: Make, asked: list[Request]) -> None:
    answers = make(turns=1)
    answers.folder.mkdir(parents=True)
    paths = [answers.folder / f"{process}.jsonl" for process in range(2)]
    for process in range(2):
        accelerator: Any = SimpleNamespace(process_index=process, num_processes=2, wait_for_everyone=lambda: None)
        share = replace(answers, reader=replace(answers.reader, accelerator=accelerator))
        if process == 0:
            assert "the machines of this launch do not share it" in refused(share.generate)
            paths[1].touch()
        share.generate()
    assert [len(path.read_bytes().splitlines()) for path in paths] == [10, 10]
    paths[1].write_bytes(b"".join(paths[1].read_bytes().splitlines(keepends=True)[:7]))
    asked.clear()
    answers.generate()  # one process goes on
    assert len(asked) == 3 and [record["number"] for record in records(answers)] == list(range(20))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_server_gives_the_same_answers(
    temperature: float, make: Make, target: FrozenTarget, asked: list[Request]
) -> None:
    own = make(temperature=temperature).corpus()
    asked.clear()
    with serving(Stub(by_engine(target), model=target.name)) as stub:
        answers = make(temperature=temperature, server={"url": stub.url})
        assert answers.corpus().digest == own.digest
        stub.asked.clear()
        make(temperature=temperature, server={"url": stub.url + "/v1", "in_flight": 3}).corpus()
        assert not stub.asked and not asked
    answers.corpus()  # without a server, and without an engine


def test_an_engine_is_started_for_the_answers_and_ends(
    make: Make, target: FrozenTarget, tmp_path: Path, monkeypatch: Patch
) -> None:
    own = make().corpus()
    program, ended = tmp_path / "python", tmp_path / "ended"
    variable = "DRAFTSMITH_VLLM_PYTHON"
    with serving(Stub(by_engine(target), model=target.name)) as stub:
        program.write_text(f"#!/bin/sh\ncp $2 {tmp_path}/job.json; echo {stub.url}; cat; : >{ended}\n")
        program.chmod(0o755)
        monkeypatch.setenv(variable, str(program))
        assert make(server={"engine": "vllm", "in_flight": 3}).corpus().digest == own.digest
    assert ended.exists()
    job = json.loads((tmp_path / "job.json").read_text())
    assert (job["target"], job["dtype"], job["rows"], job["context"]) == (target.name, "float32", 3, 71)
    other = make(server={"engine": "vllm"}, seed=1, new_tokens=5)
    quantized = replace(other, target=load_target(target.name, quantize="int8"))
    assert "vllm would answer without target.quantize; leave the server out" in refused(quantized.corpus)
    monkeypatch.setenv(variable, str(tmp_path / "none"))
    assert "is not installed here; run scripts/make_engine.sh vllm, or name the Python" in refused(other.corpus)
    for both in ({}, {"url": "http://localhost:8000", "engine": "vllm"}):
        with pytest.raises(ValueError, match="expected either `url`"):
            make(server=both)


def test_a_server_of_other_weights_is_refused(make: Make, target: FrozenTarget) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        other = FrozenTarget(LlamaForCausalLM(target.checkpoint_config), target.name)
    with serving(Stub(by_engine(other), model=target.name)) as stub:
        with pytest.raises(UserError, match=r"expected the target's greedy answer: token \d+ at place \d"):
            make(server={"url": stub.url}).corpus()
        assert len(stub.asked) == 1


def test_a_server_that_samples_otherwise_is_refused(make: Make, target: FrozenTarget) -> None:
    own = by_engine(target)

    def cool(request: Request) -> list[int]:
        cooler = request.sampling.model_copy(update={"temperature": request.sampling.temperature**2})
        return own(replace(request, sampling=cooler))

    with serving(Stub(cool, model=target.name)) as stub:
        answers = make(temperature=0.5, new_tokens=16, server={"url": stub.url})
        with pytest.raises(UserError, match=r"its sampled texts are not the target's at T = 0\.5: .*as training data"):
            answers.corpus()
    assert not list(answers.stored_lines())


def test_prompts_come_from_every_source_by_weight(
    settings: dict[str, Any], tmp_path: Path, target: FrozenTarget, tokenizer: PreTrainedTokenizerBase
) -> None:
    chats = tmp_path / "chats.jsonl"
    chat = write_chats(chats, ({"instruction": f"say {n}", "response": "so"} for n in range(20)))
    sources = [settings["data"]["sources"][0] | {"weight": 1.0}, chat | {"weight": 3.0}]

    def opened(sources: list[dict[str, Any]], **regenerate: Any) -> TargetAnswers:
        data = Data.model_validate({"sources": sources, "regenerate": regenerate})
        return open_answers(data, 0, target, reader_of(tokenizer))

    def read(count: int) -> list[list[int]]:
        answers = opened(sources, prompts=count, prompt_tokens=12, new_tokens=16)
        firsts = [first.ids.tolist() for prompts in answers.prompts for first in prompts.corpus]
        assert [dialogue.prompt for dialogue in answers.dialogues()] == firsts
        return firsts

    prompts = read(16)
    assert len(prompts) == 16 and all(1 <= len(prompt) <= 12 for prompt in prompts)
    assert sum(str(tokenizer.decode(prompt)).startswith("<s><|user|>say") for prompt in prompts) == 12
    assert "chats.jsonl gives 20 prompts of at most 12 tokens, expected 30" in refused(read, 40)
    chats.write_text('{"text": "short"}\n')
    assert "no text has 40 characters" in refused(opened, [{"kind": "text", "path": str(chats)}])


DATED = "{{ date_string if date_string is defined else strftime_now('%d %b %Y') }}" + CHAT_TEMPLATE
"""A template with the day in it, which an argument can fix, as Llama 3.1's has it."""


@pytest.mark.slow
def test_a_day_on_no_answer_is_made_anew(settings: Settings, tmp_path: Path, capsys: Capture) -> None:
    """By a run that began on another day, by another folder that is given its day, and by recipes that state one."""
    (tmp_path / "dated.jinja").write_text(DATED)
    records = ({"messages": talk(*(f"the sea {n} {k}" for k in range(4)))} for n in range(20))
    source = write_chats(tmp_path / "chats.jsonl", records) | {"chat_template": str(tmp_path / "dated.jinja")}
    regenerate = {"prompts": 20, "prompt_tokens": 64, "new_tokens": 8}
    settings["data"] = {"sources": [source], "context_length": 96, "regenerate": regenerate}
    recipe, run = write_recipe(settings), tmp_path / "run"

    def answered(*overrides: str) -> bool:
        train(recipe, *overrides)
        said = r"data.regenerate: 20 conversations answered, [\d,]+ tokens, [\d,]+ tokens/s"
        return re.search(said, capsys.readouterr().err) is not None

    for folder in (run, tmp_path / "second", tmp_path / "fourth"):
        folder.mkdir()
        (folder / "data.json").write_text('{"date": "2031-02-03"}')
    assert answered()
    whole = weights(run, 6)
    for step in (4, 6):
        shutil.rmtree(run / f"checkpoints/step-{step}")
    assert not answered() and same(weights(run, 6), whole)
    assert not answered(f"output_dir={tmp_path}/second", "head.depth=3")
    assert answered(f"output_dir={tmp_path}/third"), "it saw the new day"
    assert json.loads((tmp_path / "third/data.json").read_text()) == {"date": str(date.today())}
    stated = "data.template.date_string=03 Feb 2031"
    assert answered(f"output_dir={tmp_path}/fourth", stated), "another prompt, by its key"
    assert not answered(f"output_dir={tmp_path}/fifth", stated), "a day on"
