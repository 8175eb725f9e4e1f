"""Recipes derived from a model and conversations: what they hold, what the user's keys do, and what is refused."""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from eval import bench, report
from eval.core.command_line import exit_status
from heads.saved import read_config
from heads.targets.target_files import load_tokenizer
from tests.conftest import TEXT
from tests.support.chats import talk, write_chats
from tests.support.published_heads import ZLAB, dflash, write
from tests.support.runs import forget_accelerator, the_error
from train.data.dialogues import first_turns, read_asked
from train.entry import attempt
from train.recipe.recipe import KINDS, load_recipe

NUMBER = 40
SMALL = [
    *("data.regenerate.new_tokens=8", "data.context_length=96", "head.depth=2", "train.max_steps=2"),
    *("train.precision=fp32", "eval.max_new_tokens=4", "eval.num_prompts=2", "eval.report.num_prompts=2"),
    "eval.report.temperature=[0]",
]


def chat(number: int, **more: Any) -> dict[str, Any]:
    return {"messages": talk(TEXT[number : number + 40], "so it is"), **more}


@pytest.fixture
def here(tmp_path: Path, tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a target and conversations, of which the last repeats the question of the first."""
    (tmp_path / "target").symlink_to(tiny_target_dir)
    chats = [chat(number, tools=[{"name": "look"}]) for number in range(NUMBER)]
    write_chats(tmp_path / "chats.jsonl", [*chats, chat(0, note="again")])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def derived(entry: str, *words: str, model: str = "target", data: str = "chats.jsonl") -> int:
    return attempt(entry, ["--model", model, "--data", data, *words])


@pytest.mark.parametrize("entry", KINDS)
def test_every_kind_gets_a_recipe_that_fits(entry: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert derived(entry, "--plan", "--tflops", "1", "train.lr=0.5") == 0
    said = capsys.readouterr().out
    folder = here / f"runs/{KINDS[entry]}-target-chats"
    recipe: Any = load_recipe(folder / "recipe.yaml")
    assert "fits: " in said and yaml.safe_load(said.partition(f"\n{KINDS[entry]} for ")[0])["train"]["lr"] == 0.5
    assert recipe.train.lr == 0.5 and recipe.train.epochs is not None and recipe.target.dtype == "float32"
    made, (source,) = recipe.data.regenerate, recipe.data.sources
    assert recipe.target.path == str(here / "target") and source.path == str(here / "chats.jsonl")
    assert recipe.eval.prompts == source.held_out == str(folder / "held-out.jsonl")
    held = [first_turns(("", json.loads(line))) for line in (folder / "held-out.jsonl").read_text().splitlines()]
    trained = [first_turns(record) for record in source.records() if not source.holds_out(record)]
    assert all(json.loads(line)["tools"] for line in (folder / "held-out.jsonl").read_text().splitlines())
    assert len(set(held)) == 8 and not {*held} & {*trained} and made.prompts == len(trained)
    assert len({*held, *trained}) == NUMBER
    assert recipe.train.tokens_per_step % (recipe.train.batch_size * recipe.data.context_length) == 0
    assert made.prompt_tokens + made.new_tokens <= recipe.data.context_length
    assert not (folder / "checkpoints").exists()


def test_a_plan_has_the_likely_number_of_steps_before_the_most(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The likely one counts the prompts as they are and half of the longest answers."""
    assert derived("eagle", "--plan", "--tflops", "1e-6") == 0
    rows = re.findall(r"^  (\S.*?) +([\d.,]+)$", capsys.readouterr().out.partition("\nthe run\n")[2], re.MULTILINE)
    found = {re.sub(" at .* a device", "", name): float(value.replace(",", "")) for name, value in rows}
    recipe: Any = load_recipe("runs/eagle3-target-chats/recipe.yaml")
    tokenizer, made = load_tokenizer("target"), recipe.data.regenerate
    asked = [tokenizer.apply_chat_template(chat(n)["messages"][:1], return_dict=False) for n in range(NUMBER)]
    prompt = sum(map(len, asked)) / NUMBER + 1  # and the mark of an answer
    likely, most = (
        recipe.train.epochs * made.prompts * tokens / recipe.train.tokens_per_step
        for tokens in (prompt + made.new_tokens / 2, made.prompt_tokens + made.new_tokens)
    )
    assert found["steps, likely"] == pytest.approx(likely, rel=0.02) and found["steps, at most"] == math.ceil(most)
    assert found["hours, at most"] == pytest.approx(found["hours, likely"] * most / likely, rel=0.02)
    assert [*found].index("hours, likely") < [*found].index("hours, at most")


def test_a_chain_is_as_long_as_the_head_that_is_there_drafts(here: Path) -> None:
    write(here / "dflash", ZLAB, dflash().to_checkpoint())
    assert derived("xpress", "--plan", "--tflops", "1", "head.init_from=dflash") == 0
    found: Any = load_recipe("runs/xpress-target-chats/recipe.yaml").eval
    assert found.tree == "chain:3" and found.report.tree == ("chain:3", "chain:2", "chain:1")


def test_a_gpu_gets_larger_sizes(here: Path) -> None:
    assert derived("eagle", "--plan", "--tflops", "1", "--memory", "80", "output_dir=large") == 0
    recipe: Any = load_recipe("large/recipe.yaml")
    assert recipe.target.dtype == "bfloat16" and recipe.eval.report.batch_size == (1, 4, 16)
    assert 8192 < recipe.train.tokens_per_step <= 16384 and recipe.output_dir == str(here / "large")


@pytest.mark.parametrize(
    ("words", "optimizer", "share"),
    [([], "muon", 1), (["train.optimizer=adamw"], "adamw", 1 / 3), (["--sharing", "zero2"], "adamw", 1 / 3)],
)
def test_the_learning_rate_is_that_of_the_optimizer(words: list[str], optimizer: str, share: float, here: Path) -> None:
    assert derived("eagle", "--plan", "--tflops", "1", *words) == 0
    train = load_recipe("runs/eagle3-target-chats/recipe.yaml").train
    assert train.optimizer == optimizer and train.lr == pytest.approx(share * 1.5 / 32, rel=0.05)


@pytest.mark.parametrize(
    ("serve", "norms", "said"),
    [
        ([], False, "plain, for vllm, sglang, llama.cpp, openvino; head.serve=[vllm,sglang] adds fc_norm and norm"),
        (["head.serve=[sglang,vllm]"], True, "with fc_norm and norm_output, for sglang, vllm"),
        (["head.serve=[vllm,openvino]"], False, "plain, for vllm, openvino; head.serve=[vllm] adds fc_norm"),
    ],
)
def test_a_head_has_the_form_that_its_engines_read(
    serve: list[str], norms: bool, said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert derived("eagle", "--plan", "--tflops", "1", *serve) == 0
    head: Any = load_recipe("runs/eagle3-target-chats/recipe.yaml").head
    assert (head.fc_norm, head.norm_output) == (norms, norms) and head.serve
    shown = capsys.readouterr()
    assert f"the head is {said}" in shown.out + shown.err


@pytest.mark.slow
def test_a_derived_run_resumes_moves_and_is_measured_from_any_folder(
    here: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert derived("eagle", *SMALL) == 0
    said = capsys.readouterr()
    run = here / "runs/eagle3-target-chats"
    results = json.loads((run / "results.json").read_text())
    assert {m["batch_size"] for m in results["measurements"]} == {1, 4}
    assert results["exact"]["identical"] == results["exact"]["prompts"] > 0
    assert " greedy" in said.out.splitlines()[-2] and ": vllm serve /" in said.out.splitlines()[-1]
    recipe = (run / "recipe.yaml").read_text()

    def again(*words: str) -> None:
        forget_accelerator()
        capsys.readouterr()
        assert attempt("eagle", [*words]) == 0
        said = capsys.readouterr().err
        assert "finished already" in said and "measured already" in said

    again(*GIVEN, *SMALL)
    again("runs/eagle3-target-chats/recipe.yaml")
    assert (run / "recipe.yaml").read_text() == recipe
    moved = tmp_path_factory.mktemp("elsewhere") / "moved"
    shutil.move(run, moved)
    monkeypatch.chdir(moved.parent)
    again("moved/recipe.yaml")
    assert exit_status(lambda: report.main(["moved"])) == 0
    assert f": vllm serve {here}/target " in capsys.readouterr().out.splitlines()[-1]
    assert not run.exists() and read_config(moved / "head")["target"]["name"] == str(here / "target")
    options = ["--prompts", "moved/held-out.jsonl", "--num-prompts", "2", "--max-new-tokens", "4", "--repeats", "1"]
    assert exit_status(lambda: bench.main(["moved", *options, "--tree", "chain:2", "--out", "measured"])) == 0


GIVEN = ["--model", "target", "--data", "chats.jsonl"]
REFUSED: list[tuple[list[str], str]] = [
    (GIVEN[:2], "--data: is missing"),
    (GIVEN[2:], "--model: is missing"),
    (["recipe.yaml", *GIVEN], "recipe.yaml: --model and --data are in place of"),
    (["--model", "target", "--data", "no.jsonl"], "no.jsonl: no such file"),
    (["--model", "no/such/model", "--data", "chats.jsonl"], "no/such/model: no such folder"),
    (["--model", "target", "--data", "few.jsonl"], "got 3 in 3 records"),
    (["--model", "target", "--data", "odd.jsonl"], "got 0 in 30 records"),
    (["--model", "target", "--data", "odd.jsonl"], "odd.jsonl:1: expected a record with 'messages'"),
    ([*GIVEN, "data.regenerate.prompt_tokens=2"], "got 0 in 41 records"),
    ([*GIVEN, "data.regenerate.new_tokens=512"], "new_tokens: expected less"),
    ([*GIVEN, "trian.lr=1"], "did you mean 'train'?"),
    ([*GIVEN, "head.kind=mtp", "head={kind: mtp}"], "use train/mtp.py"),
    ([*GIVEN, "train.lr"], "override 'train.lr': expected key.sub=value"),
    ([*GIVEN, "data.sources=[{kind: python}]"], "of kind chat"),
    ([*GIVEN, "output_dir=chats.jsonl"], "expected a folder"),
    ([*GIVEN, "eval.prompts=chats.jsonl"], "none is left to train on"),
]


@pytest.mark.parametrize(("words", "named"), REFUSED)
def test_what_cannot_be_derived(words: list[str], named: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_chats(here / "few.jsonl", map(chat, range(3)))
    (here / "odd.jsonl").write_text('{"title": "no chat"}\n' * 30)
    assert attempt("eagle", words) == 2
    assert named in the_error(capsys) and not (here / "runs").exists()


def test_what_is_left_out_is_counted_and_shown(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd: Any = {"messages": None}
    write_chats(here / "one.jsonl", [*map(chat, range(NUMBER)), chat(0), {"prompt": TEXT * 3}, odd])
    assert derived("eagle", "--plan", *SMALL, data="one.jsonl", model="target") == 0
    said = capsys.readouterr().err
    assert "one.jsonl: 1 of 43 records are skipped: 1 no turns; the first is one.jsonl:43: messages: expected" in said
    assert "one.jsonl: 1 records begin with a prompt of more than 88 tokens (data.regenerate.prompt_tokens) and" in said
    write_chats(here / "twice.jsonl", [*map(chat, range(NUMBER))] * 2)
    assert derived("eagle", "--plan", *SMALL, data="twice.jsonl") == 0
    line = "64 of 80 records are trained on, 8 conversations are held out; 8 records with the first prompt of one"
    assert line in capsys.readouterr().err
    write_chats(here / "many.jsonl", [*map(chat, range(NUMBER)), *[odd] * 3])
    assert derived("eagle", "--plan", data="many.jsonl") == 2
    assert "3 of 43 records are skipped: 3 no turns; the first is many.jsonl:41: " in the_error(capsys)


def test_a_prompt_without_an_answer_is_a_conversation() -> None:
    asked = {"role": "user", "content": "why"}
    for record in ({"prompt": "why"}, {"turns": ["why"]}, {"messages": [asked]}, {"prompt": [asked]}):
        assert [message["role"] for message in read_asked(("x:1", record)).messages] == ["user", "assistant"]
        assert first_turns(("x:1", record)) == ("user", "why")


def test_a_runs_recipe_goes_with_its_folder(tiny_run: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_run / "run", tmp_path / "moved")
    assert load_recipe(tmp_path / "moved/recipe.yaml").output_dir == str(tmp_path / "moved")
    assert load_recipe(tmp_path / "moved/recipe.yaml", ["output_dir=new"]).output_dir == "new"
    shutil.copy(tiny_run / "run/recipe.yaml", tmp_path / "recipe.yaml")  # which is now a recipe as any other
    made_in = yaml.safe_load((tmp_path / "recipe.yaml").read_text())["output_dir"]
    assert load_recipe(tmp_path / "recipe.yaml").output_dir == made_in != str(tmp_path / "moved")
