"""Prompt suites: what is read, what is refused and where the message points."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from eval.data.prompts import Prompt, follow_up, held_out_prompts, load_prompts, prompts_hash, windows
from eval.data.python_source import read_split
from eval.measure.open_models import load_suites
from eval.records.measure_settings import BenchSettings
from heads.core.errors import UserError
from heads.targets.target_files import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_target_dir: Path) -> PreTrainedTokenizerBase:
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(tiny_target_dir)
    return loaded


@pytest.fixture
def plain_tokenizer(tiny_target_dir: Path) -> PreTrainedTokenizerBase:
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(tiny_target_dir)
    loaded.chat_template = None
    return loaded


def write(path: Path, *records: Any) -> str:
    text = "".join(json.dumps(record) + "\n" for record in records)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return str(path)


def load(path: str, tokenizer: PreTrainedTokenizerBase, **settings: Any) -> list[Prompt]:
    return load_prompts(path, tokenizer, **{"max_prompt_tokens": 400, **settings})


def test_prompts_with_a_token_that_the_target_lacks_are_left_out(
    tiny_target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = load_tokenizer(str(tiny_target_dir))
    tokenizer.add_tokens(["<|image|>"], special_tokens=True)
    records = [{"prompt": "one"}, {"prompt": "a <|image|> b"}, {"turns": ["one", "two <|image|>"]}]
    path = write(tmp_path / "p.jsonl", *records)
    assert [prompt.text for prompt in load(path, tokenizer, vocab_size=128)] == ["<s><|user|>one<|assistant|>"]
    line = "2 of 3 prompts have a token that the target has no row for and are skipped; the first is"
    assert f"{line} {path}:2: token '<|image|>' (128) is none of the target's 128 tokens" in capsys.readouterr().err
    assert len(load(path, tokenizer, vocab_size=129)) == 3
    with pytest.raises(UserError, match=r"1 of 1 prompts have a token .* such as .*q.jsonl:1: token '<|image|>'"):
        load(write(tmp_path / "q.jsonl", records[1]), tokenizer, vocab_size=128)
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
    tmp_path: Path, plain_tokenizer: PreTrainedTokenizerBase, record: dict[str, Any], text: str
) -> None:
    (prompt,) = load(write(tmp_path / "my_suite.jsonl.gz", record), plain_tokenizer)
    assert prompt.text == text and plain_tokenizer.decode(list(prompt.ids)) == text
    assert prompt.suite == "my_suite"


def test_a_chat_template_is_used_and_no_special_token_doubled(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    record = {"messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]}
    orca = {"system_prompt": "be kind", "question": "hi", "response": "ho"}
    prompt, other = load(write(tmp_path / "a.jsonl", record, orca), tokenizer)
    assert prompt.text == other.text == "<s><|system|>be kind<|user|>hi<|assistant|>"
    assert prompt.ids.count(tokenizer.bos_token_id) == 1 and prompt.ids[-1] == tokenizer.convert_tokens_to_ids(
        "<|assistant|>"
    )


def test_a_second_turn_follows_the_targets_own_answer(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    record = {"question_id": 81, "category": "writing", "turns": ["one", "two"]}
    (first,) = load(write(tmp_path / "a.jsonl", record), tokenizer)
    second = follow_up(first, "an answer", tokenizer)
    assert second.text == "<s><|user|>one<|assistant|>an answer</s><|user|>two<|assistant|>"
    assert (second.id, second.category, second.later_turns) == ("81#2", "writing", ())
    ids = tokenizer("an answer</s>", add_special_tokens=False)["input_ids"]
    assert follow_up(first, ids, tokenizer) == second


def test_a_prompt_has_its_tools_in_every_turn(
    tmp_path: Path, tiny_target_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = load_tokenizer(str(tiny_target_dir))
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


def test_fewer_prompts_are_spread_over_the_suite(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    path = write(tmp_path / "a.jsonl", *({"prompt": f"p{i}", "category": str(i // 10)} for i in range(40)))
    chosen = load(path, tokenizer, num_prompts=4)
    assert [prompt.category for prompt in chosen] == ["0", "1", "2", "3"]


REFUSED = {
    '{"answer": "x"}': "expected a prompt in one of turns, messages",
    '{"prompt": ""}': "prompt: the prompt is empty",
    '{"messages": []}': "messages: the prompt is empty",
    '{"messages": [{"role": "user", "content": ""}]}': "messages: the prompt is empty",
    '{"turns": ["a", "\\n "]}': "turns: turn 2 of the user is empty",
    '{"turns": [1, 2]}': "turns: expected text",
    '{"messages": [{"role": "assistant", "content": "x"}]}': "messages: expected a message of role",
}


def test_a_bad_prompt_is_named_with_its_line(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    for content, said in REFUSED.items():
        (tmp_path / "a.jsonl").write_text(f"{content}\n")
        with pytest.raises(UserError, match=f"a.jsonl:1: .*{said}|a.jsonl:1: {said}"):
            load(str(tmp_path / "a.jsonl"), tokenizer)
    with pytest.raises(UserError, match="no suite of that name; known suites: python-heldout, spec_bench"):
        load("speck_bench", tokenizer)
    path = write(tmp_path / "a.jsonl", {"prompt": "short"}, {"prompt": "x" * 500})
    with pytest.raises(UserError, match=r"a.jsonl:2: the prompt has 50\d tokens where at most 400 fit"):
        load(path, tokenizer)
    assert [prompt.id for prompt in load(path, tokenizer, skip_long=True)] == ["1"]


def test_windows_are_cut_one_after_another(tmp_path: Path, plain_tokenizer: PreTrainedTokenizerBase) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "abcabcabc " * 20}, {"prompt": "abcabcabc " * 20})
    whole = [token for prompt in load(path, plain_tokenizer) for token in prompt.ids]
    cut = windows(path, plain_tokenizer, 16, 3)
    assert [token for prompt in cut for token in prompt.ids] == whole[:48] and cut[2].suite == "a"
    with pytest.raises(UserError, match=f"texts have {len(whole)} tokens, 3 prompts of 999 need 2997"):
        windows(path, plain_tokenizer, 999, 3)


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


def test_held_out_prompts_are_64_to_128_tokens_from_the_start_of_a_line(
    tokenizer: PreTrainedTokenizerBase, held_out: Path
) -> None:
    prompts = held_out_prompts(tokenizer, 10, 400, 0, held_out)
    assert len(prompts) == 10 and len({prompt.text for prompt in prompts}) == 10
    for prompt in prompts:
        name, line = prompt.id.rsplit(":", 1)
        assert 64 <= len(prompt.ids) <= 128
        assert "".join(texts_of(held_out)[name].splitlines(keepends=True)[int(line) - 1 :]).startswith(prompt.text)


def test_held_out_prompts_depend_on_the_seed_and_on_no_other_module(
    tokenizer: PreTrainedTokenizerBase, held_out: Path, tmp_path: Path
) -> None:
    first = held_out_prompts(tokenizer, 2, 400, 0, held_out)
    assert prompts_hash(first) == prompts_hash(held_out_prompts(tokenizer, 2, 400, 0, held_out))
    assert prompts_hash(first) != prompts_hash(held_out_prompts(tokenizer, 2, 400, 1, held_out))
    name = first[1].id.rsplit(":", 1)[0]
    (tmp_path / name).write_text(texts_of(held_out)[name])
    assert held_out_prompts(tokenizer, 1, 400, 0, tmp_path) == first[1:]
