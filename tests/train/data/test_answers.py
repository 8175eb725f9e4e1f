"""The target's own answers: what the runtime gives, kept and taken up again."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from eval.runtime.engine import Engine, EngineOptions, Request
from heads.errors import UserError
from heads.target.frozen import FrozenTarget, load_target, load_tokenizer
from tests.chats import reader_of
from train.data.answers import Regenerate, answer_documents, answers_key, make_answers
from train.data.loading import read_prompts, read_source
from train.recipe import load_recipe

PROMPTS = [[0, 40 + n, 50, 60 + n] for n in range(9)]


def ask(prompts: list[list[int]], **settings: Any) -> list[Request]:
    sampled = Regenerate(prompts=9, **{"new_tokens": 6, **settings})
    return [sampled.request(prompt, n) for n, prompt in enumerate(prompts)]


GREEDY = ask(PROMPTS)


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> FrozenTarget:
    return load_target(str(tiny_target_dir))


def test_answers_are_the_targets_greedy_continuations(target: FrozenTarget, tmp_path: Path) -> None:
    made = make_answers(target, GREEDY, 1, tmp_path)
    engine = Engine(target, None, EngineOptions(max_length=32))
    assert made == [output.tokens for output in engine.generate([Request(prompt, 6) for prompt in PROMPTS])]


class Noting(Engine):
    """An engine that notes the requests that it is given."""

    noted: ClassVar[list[Request]] = []

    def generate(self, requests: Any, **rest: Any) -> Any:
        self.noted.extend(requests)
        return super().generate(requests, **rest)


@pytest.fixture
def asked() -> list[Request]:
    """Requests that engines were given."""
    Noting.noted.clear()
    return Noting.noted


def test_answers_are_made_once(target: FrozenTarget, tmp_path: Path, asked: list[Request]) -> None:
    made = make_answers(target, GREEDY, 1, tmp_path, open_engine=Noting)
    assert len(asked) == len(PROMPTS)
    assert make_answers(target, GREEDY, 1, tmp_path, open_engine=Noting) == made and len(asked) == len(PROMPTS)
    assert len(list(tmp_path.iterdir())) == 1


def test_an_interrupted_file_is_taken_up_at_its_last_whole_line(
    target: FrozenTarget, tmp_path: Path, asked: list[Request]
) -> None:
    made = make_answers(target, GREEDY, 1, tmp_path)
    (whole,) = tmp_path.iterdir()
    lines = whole.read_text().splitlines(keepends=True)
    whole.unlink()
    part = tmp_path / f"answers-{answers_key(target, GREEDY)}.0-of-1.part"
    part.write_text("".join(lines[:7]) + lines[7][:3])
    asked.clear()
    assert make_answers(target, GREEDY, 1, tmp_path, open_engine=Noting) == made and len(asked) == 2


def test_shares_of_two_processes_make_the_same_answers(target: FrozenTarget, tmp_path: Path) -> None:
    sampled = ask(PROMPTS, temperature=1.0)
    alone = make_answers(target, sampled, 1, tmp_path)
    (tmp_path / "two").mkdir()

    def other_process() -> None:
        """Its own share, which the first process is waiting for."""
        with pytest.raises(FileNotFoundError):  # of the whole, which the first writes
            make_answers(target, sampled, 1, tmp_path / "two", process=1, num_processes=2)

    waits: Iterator[Callable[[], None]] = iter([other_process, lambda: None])
    both = make_answers(target, sampled, 1, tmp_path / "two", num_processes=2, wait=lambda: next(waits)())
    assert both == alone


def test_the_key_is_what_answers_depend_on(target: FrozenTarget) -> None:
    key = answers_key(target, GREEDY)
    assert answers_key(target, ask(PROMPTS, seed=3)) == key
    others = [ask(PROMPTS, new_tokens=7), ask(PROMPTS, temperature=1.0), ask(PROMPTS[1:])]
    assert all(answers_key(target, other) != key for other in others)


def test_a_damaged_file_is_named_by_line(target: FrozenTarget, tmp_path: Path) -> None:
    make_answers(target, GREEDY, 1, tmp_path)
    (whole,) = tmp_path.iterdir()
    whole.write_text(whole.read_text().replace("[", "", 1))
    with pytest.raises(UserError, match=r"\.jsonl:1: expected a list of token ids"):
        make_answers(target, GREEDY, 1, tmp_path)


def test_only_the_answer_is_trained_on_unless_given_otherwise() -> None:
    (document,) = answer_documents([[1, 2]], [[3, 4, 5]], train_on_prompts=False)
    assert document.ids.tolist() == [1, 2, 3, 4, 5] and document.labels.tolist() == [False, False, True, True, True]
    (document,) = answer_documents([[1, 2]], [[3, 4, 5]], train_on_prompts=True)
    assert document.labels.all()


def test_prompts_come_from_every_source_by_weight(
    settings: dict[str, Any], write_recipe: Callable[[dict[str, Any]], Path], tmp_path: Path, tiny_target_dir: Path
) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text("".join(json.dumps({"instruction": f"say {n}", "response": "so"}) + "\n" for n in range(20)))
    text = settings["data"]["sources"][0] | {"weight": 1.0}
    settings["data"]["sources"] = [text, {"kind": "chat", "path": str(chats), "weight": 3.0}]
    settings["data"]["regenerate"] = {"prompts": 16, "prompt_tokens": 12, "new_tokens": 16}
    settings["head"] = {"kind": "eagle3"}
    tokenizer = load_tokenizer(str(tiny_target_dir))

    def read() -> list[list[int]]:
        recipe = load_recipe(write_recipe(settings))
        assert recipe.data.regenerate is not None
        reader = reader_of(tokenizer)
        return read_prompts(recipe.data, recipe.train.seed, recipe.data.regenerate, "data.regenerate", reader)

    prompts = read()
    assert len(prompts) == 16 and all(1 <= len(prompt) <= 12 for prompt in prompts)
    assert sum(str(tokenizer.decode(prompt)).startswith("<s><|user|>say") for prompt in prompts) == 12
    settings["data"]["regenerate"]["prompts"] = 40
    with pytest.raises(UserError, match=r"chats.jsonl gives 20 prompts of at most 12 tokens, expected 30"):
        read()


def test_a_file_whose_every_label_is_masked_is_refused(
    settings: dict[str, Any], write_recipe: Callable[[dict[str, Any]], Path], tmp_path: Path, tiny_target_dir: Path
) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n' * 3)
    settings["data"]["sources"] = [{"kind": "chat", "path": str(chats)}]
    settings["head"] = {"kind": "eagle3"}
    source = load_recipe(write_recipe(settings)).data.sources[0]
    with pytest.raises(UserError, match=r"chats.jsonl: 3 of 3 records are left out: 3 without an answer"):
        read_source(source, "data.sources.0", reader_of(load_tokenizer(str(tiny_target_dir))))
