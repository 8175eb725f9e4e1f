"""Prompt suites: what is read, what is refused and where the message points."""

import gzip
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase as Tokenizer

from eval.data.prompts import Prompt, follow_up, held_out_prompts, load_prompts, prompts_hash, windows
from eval.data.python_source import read_split
from eval.measure.open_models import load_suites
from eval.records.measure_settings import BenchSettings
from heads.targets.target_files import load_tokenizer
from tests.support.annotations import Capture
from tests.support.refusals import refused


@pytest.fixture
def tokenizer(tiny_target_dir: Path) -> Tokenizer:
    return load_tokenizer(str(tiny_target_dir))


@pytest.fixture
def plain_tokenizer(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.chat_template = None
    return tokenizer


def write(path: Path, *records: Any) -> str:
    data = "".join(json.dumps(record) + "\n" for record in records).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)


def load(path: str, tokenizer: Tokenizer, **settings: Any) -> list[Prompt]:
    return load_prompts(path, tokenizer, **{"max_prompt_tokens": 400, **settings})


def test_prompts_with_a_token_without_a_row_are_left_out(tokenizer: Tokenizer, tmp_path: Path, capsys: Capture) -> None:
    tokenizer.add_tokens(["<|image|>"], special_tokens=True)
    records = [{"prompt": "one"}, {"prompt": "a <|image|> b"}, {"turns": ["one", "two <|image|>"]}]
    path = write(tmp_path / "p.jsonl", *records)
    assert [prompt.text for prompt in load(path, tokenizer, vocab_size=128)] == ["<s><|user|>one<|assistant|>"]
    line = "2 of 3 prompts have a token that the target has no row for and are skipped; the first is"
    assert f"{line} {path}:2: token '<|image|>' (128) is none of the target's 128 tokens" in capsys.readouterr().err
    assert len(load(path, tokenizer, vocab_size=129)) == 3
    fault = refused(load, write(tmp_path / "q.jsonl", records[1]), tokenizer, vocab_size=128)
    assert re.search(r"1 of 1 prompts have a token .* such as .*q.jsonl:1: token '<\|image\|>'", fault)
    settings = BenchSettings(prompts=write(tmp_path / "r.jsonl", {"turns": ["one", "two"]}))
    assert len(load_suites(settings, tokenizer, 400, lambda _: ["an image"], 128)) == 2
    assert len(load_suites(settings, tokenizer, 400, lambda _: ["<|image|>"], 128)) == 1  # the answer spells it


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"turns": ["hello there", "and then"]}, "hello there"),
        ({"prompt": "def f():", "task_id": "HumanEval/0"}, "def f():"),
        ({"prompt": ["first", "second"], "prompt_id": 7}, "first"),
        ({"question": "how many", "answer": "18"}, "how many"),
        ({"instruction": "sum up", "input": "a text", "output": "x"}, "sum up\n\na text"),
        ({"text": "write a function", "code": "..."}, "write a function"),
        ({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}, "hi"),
        ({"messages": '[{"role": "user", "content": "hi"}]'}, "hi"),
        ({"question_id": "q1", "cluster": "games", "turns": [{"content": "hi"}, {"content": "and"}]}, "hi"),
    ],
)
def test_every_form_of_record_becomes_its_first_user_turn(
    tmp_path: Path, plain_tokenizer: Tokenizer, record: dict[str, Any], text: str
) -> None:
    (prompt,) = load(write(tmp_path / "my_suite.jsonl.gz", record), plain_tokenizer)
    assert prompt.text == text and plain_tokenizer.decode(list(prompt.ids)) == text
    assert prompt.suite == "my_suite"


def test_a_chat_template_is_used_and_no_special_token_doubled(tmp_path: Path, tokenizer: Tokenizer) -> None:
    record = {"messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]}
    orca = {"system_prompt": "be kind", "question": "hi", "response": "ho"}
    prompt, other = load(write(tmp_path / "a.jsonl", record, orca), tokenizer)
    assert prompt.text == other.text == "<s><|system|>be kind<|user|>hi<|assistant|>"
    assert prompt.ids.count(tokenizer.bos_token_id) == 1


def test_a_second_turn_follows_the_targets_own_answer(tmp_path: Path, tokenizer: Tokenizer) -> None:
    record = {"question_id": 81, "category": "writing", "turns": ["one", "two"]}
    (first,) = load(write(tmp_path / "a.jsonl", record), tokenizer)
    second = follow_up(first, "an answer", tokenizer)
    assert second.text == "<s><|user|>one<|assistant|>an answer</s><|user|>two<|assistant|>"
    assert (second.id, second.category, second.later_turns) == ("81#2", "writing", ())
    ids = tokenizer("an answer</s>", add_special_tokens=False)["input_ids"]
    assert follow_up(first, ids, tokenizer) == second


def test_a_prompt_has_its_tools_in_every_turn(tmp_path: Path, tokenizer: Tokenizer, capsys: Capture) -> None:
    tool = {"name": "look", "parameters": {}}
    path = write(tmp_path / "a.jsonl", {"turns": ["one", "two"], "functions": json.dumps([tool])})
    (plain,) = load(path, tokenizer)
    assert f"{path}: the chat template renders no tools, which 1 prompts have" in capsys.readouterr().err
    tokenizer.chat_template = "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}" + tokenizer.chat_template
    (first,) = load(path, tokenizer)
    assert first.text == "look " + plain.text and first.tools == [{"type": "function", "function": tool}]
    assert follow_up(first, "so", tokenizer).text.startswith("look <s><|user|>one<|assistant|>so")
    assert not capsys.readouterr().err
    without = [replace(first, ids=(), tools=tools) for tools in (first.tools, None)]
    assert prompts_hash(without[:1]) != prompts_hash(without[1:])


def test_fewer_prompts_are_spread_over_the_suite(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write(tmp_path / "a.jsonl", *({"prompt": f"p{i}", "category": str(i // 10)} for i in range(40)))
    assert [prompt.category for prompt in load(path, tokenizer, num_prompts=4)] == ["0", "1", "2", "3"]


REFUSED = {
    '{"answer": "x"}': "expected a prompt in one of turns, messages",
    '{"prompt": ""}': "prompt: the prompt is empty",
    '{"messages": []}': "messages: the prompt is empty",
    '{"messages": [{"role": "user", "content": ""}]}': "messages: the prompt is empty",
    '{"turns": ["a", "\\n "]}': "turns: turn 2 of the user is empty",
    '{"turns": [1, 2]}': "turns: expected text",
    '{"messages": [{"role": "assistant", "content": "x"}]}': "messages: expected a message of role",
}


def test_a_bad_prompt_is_named_with_its_line(tmp_path: Path, tokenizer: Tokenizer) -> None:
    for content, said in REFUSED.items():
        (tmp_path / "a.jsonl").write_text(f"{content}\n")
        assert re.search(f"a.jsonl:1: .*{said}", refused(load, str(tmp_path / "a.jsonl"), tokenizer))
    known = "no suite of that name; known suites: python-heldout, spec_bench"
    assert known in refused(load, "speck_bench", tokenizer)
    path = write(tmp_path / "a.jsonl", {"prompt": "short"}, {"prompt": "x" * 500})
    assert re.search(r"a.jsonl:2: the prompt has 50\d tokens where at most 400 fit", refused(load, path, tokenizer))
    assert [prompt.id for prompt in load(path, tokenizer, skip_long=True)] == ["1"]


def test_windows_are_cut_one_after_another(tmp_path: Path, plain_tokenizer: Tokenizer) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "abcabcabc " * 20}, {"prompt": "abcabcabc " * 20})
    whole = [token for prompt in load(path, plain_tokenizer) for token in prompt.ids]
    cut = windows(path, plain_tokenizer, 16, 3)
    assert [token for prompt in cut for token in prompt.ids] == whole[:48] and cut[2].suite == "a"
    fault = f"texts have {len(whole)} tokens, 3 prompts of 999 need 2997"
    assert fault in refused(windows, path, plain_tokenizer, 999, 3)


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of modules, of which some are held out; one in three is too short for a prompt."""
    root = tmp_path_factory.mktemp("source")
    for n in range(200):
        lines = [f"value_{n}_{i} = call_of_{n}({i}, 'text')\n" for i in range(80)]
        (root / f"module{n}.py").write_text("".join(lines) if n % 3 else "x = 1\n" * 200)
    return root


def texts_of(root: Path) -> dict[str, str]:
    return dict(read_split(held_out=True, root=root))


def test_held_out_prompts_are_64_to_128_tokens_from_the_start_of_a_line(tokenizer: Tokenizer, held_out: Path) -> None:
    prompts = held_out_prompts(tokenizer, 10, 400, 0, held_out)
    assert len(prompts) == 10 and len({prompt.text for prompt in prompts}) == 10
    for prompt in prompts:
        name, line = prompt.id.rsplit(":", 1)
        assert 64 <= len(prompt.ids) <= 128
        assert "".join(texts_of(held_out)[name].splitlines(keepends=True)[int(line) - 1 :]).startswith(prompt.text)


def test_held_out_prompts_depend_on_seed_and_module_alone(tokenizer: Tokenizer, held_out: Path, tmp_path: Path) -> None:
    first = held_out_prompts(tokenizer, 2, 400, 0, held_out)
    assert prompts_hash(first) == prompts_hash(held_out_prompts(tokenizer, 2, 400, 0, held_out))
    assert prompts_hash(first) != prompts_hash(held_out_prompts(tokenizer, 2, 400, 1, held_out))
    name = first[1].id.rsplit(":", 1)[0]
    (tmp_path / name).write_text(texts_of(held_out)[name])
    assert held_out_prompts(tokenizer, 1, 400, 0, tmp_path) == first[1:]
