"""Tests of users' errors: exit status 2, one clear line, nothing written and nothing lost."""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from eval import bench, report
from eval.benchmark.results import read_results
from eval.command import exit_status
from heads.checkpoint import load_head, read_config, save_head
from heads.errors import UserError
from tests.faults import small_files
from tests.native_mtp import change_weights
from tests.processes import ROOT, finish, launcher, start
from tests.runs import forget_accelerator
from train.data.corpus import unwritable
from train.entry import attempt

TEXT = "the sea is near the trees and the stone is on the sand; there are ten birds in the den. "
CHAT = "data.sources=[{kind: chat, path: bad.jsonl}]"
BAD = "data.sources.0.path=bad.jsonl"
LONG = b'{"text": "%s"}\n' % (b"sea " * 600)
IMAGE = b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}\n'
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path) -> Path:
    """A folder with a recipe, its data, and its finished run."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "data.jsonl").write_text("".join(f'{{"text": "{TEXT[n:]}{TEXT[:n]}"}}\n' for n in range(0, 80, 5)))
    (folder / "prompts.jsonl").write_text('{"text": "the sea is near"}\n{"text": "there are ten"}\n')
    recipe = {
        "output_dir": "run",
        "target": {"path": str(tiny_target_dir)},
        "head": {"kind": "eagle3", "depth": 2, "intermediate_size": 32},
        "data": {"sources": [{"kind": "text", "path": "data.jsonl"}], "context_length": 48},
        "train": dict(max_steps=2, batch_size=2, lr=0.01, precision="fp32", log_every=1, checkpoint_every=1),
        "eval": {"prompts": "prompts.jsonl", "max_new_tokens": 8, "tree": "chain:2", "report": {"repeats": 1}},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert attempt("eagle", ["recipe.yaml"]) == 0
        forget_accelerator()
    return folder


@pytest.fixture
def here(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the folder `trained`, as the current folder."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    forget_accelerator()


@pytest.fixture
def refused(here: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[Callable[[], int]], str]:
    """A function that runs a command, which must be refused, and returns its error line."""

    def run(command: Callable[[], int]) -> str:
        before = contents(here)
        capsys.readouterr()
        assert command() == 2
        said = capsys.readouterr()
        errors = [line for line in said.err.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1 and said.err.splitlines()[-1] == errors[0] and not said.out, said
        assert contents(here) == before
        return errors[0]

    return run


def contents(folder: Path) -> dict[Path, bytes | None]:
    """Return every file with its bytes, and every folder, except locks: they contain their last owner's process id."""
    paths = [path for path in folder.rglob("*") if path.name != ".lock"]
    return {path: path.read_bytes() if path.is_file() else None for path in paths}


def train(*changes: str) -> int:
    return attempt("eagle", ["recipe.yaml", "output_dir=a/b/new", *changes])


def measure(head: str = "run", *options: str) -> int:
    given = ["--prompts", "prompts.jsonl", "--tree", "chain:2", "--max-new-tokens", "8", "--repeats", "1"]
    return exit_status(lambda: bench.main([head, *given, "--out", "out", *options]))


def make_target(folder: Path, like: Path, *, seed: int = 1, **changes: Any) -> None:
    """Write another target with the tokenizer of the target `like`."""
    config = LlamaConfig(**{**json.loads((like / "config.json").read_text()), **changes})
    shutil.copytree(like, folder, ignore=lambda *_: [WEIGHTS])
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(folder)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        (["trian.max_steps=3"], "unknown key; did you mean 'train'?"),
        (["head.aux_layer_ids=[1, 99]"], "head.aux_layer_ids: 99 is not a residual stream"),
        (["data.context_length=4096"], "expected at most 512, the context of"),
        (["head.kind=[1]"], "head.kind: unknown kind [1]"),
        (["data.sources=[{}]"], "data.sources.0.kind: is missing; one of python, text, chat"),
        (["head.depth=48"], "head.depth: expected less than data.context_length (48)"),
        (["eval.report.temperatures=[1e-30]"], "eval.report.temperatures.0: temperature: expected 0 (greedy) or"),
    ],
)
def test_recipes(changes: list[str], fault: str, refused: Any) -> None:
    assert fault in refused(lambda: train(*changes))


MISTAKES = {
    "a typo in a key": (["trian.max_steps=3"], "trian: unknown key; did you mean 'train'?"),
    "no target": (["target.path=no/such/folder"], "no/such/folder"),
    "no data": (["data.sources.0.path=no.jsonl"], "no.jsonl: no such file"),
    "unreadable data": (["data.sources.0.path=run/head/config.json"], "run/head/config.json:1: expected a"),
    "a wrong type": (["train.max_steps=many"], "train.max_steps"),
    "an override without a value": (["train.max_steps"], "override 'train.max_steps': expected key.sub=value"),
    "another method's recipe": (["head.kind=mtp"], "use train/mtp.py"),
    "no such suite": (["eval.prompts=mt-bench"], "mt-bench: no such file, and no suite of that name"),
    "no tree": (["eval.tree=oak"], "eval.tree"),
    "another run's folder": (["output_dir=run", "train.lr=0.02"], "train.lr was 0.01, is 0.02"),
}
"""Overrides that a user may mistype, and words of the line that says so."""


@pytest.mark.parametrize(("changes", "fault"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line_and_the_last_one(changes: list[str], fault: str, refused: Any) -> None:
    assert fault in refused(lambda: train(*changes))


@pytest.mark.slow
@pytest.mark.parametrize("mistake", ["a typo in a key", "no data"])
def test_a_mistake_is_the_last_line_of_both_forms_of_a_launch(mistake: str, here: Path) -> None:
    changes, fault = MISTAKES[mistake]
    launch = [*launcher(), "-q", "--config_file", str(ROOT / "recipes/accelerate/local.yaml")]
    for form, status in ((None, 2), (launch, 1)):
        said = finish(start(Path("recipe.yaml"), "output_dir=new", *changes, launcher=form, folder=here), status)
        last = said.splitlines()[-1]
        assert last.startswith("error: ") and fault in last and said.count("error: ") == 1, said


def test_a_bad_head_is_given_before_any_data_is_read(refused: Any) -> None:
    assert "head.aux_layer_ids" in refused(lambda: train("head.aux_layer_ids=[]", "data.sources.0.path=no.jsonl"))


@pytest.mark.parametrize(
    ("data", "changes", "fault"),
    [
        (b'{"text": "a"}\n{"text": \n', [BAD], "bad.jsonl:2: expected a JSON record (Expecting value at column 9)"),
        (b'{"txt": "a"}\n', [BAD], "bad.jsonl:1: expected a record with 'text', got keys txt"),
        (b'{"text": "a"}\n', [BAD], "no token to train on: every document is too short"),
        (b'{"messages": "hi"}\n', [CHAT], "bad.jsonl:1: expected 'messages' to be a list of turns"),
        (IMAGE, [CHAT], "bad.jsonl:1: messages[0]: images and other media are not supported"),
        (b"", ["data.sources.0.path=no.jsonl"], "no.jsonl: no such file"),
        (b'{"text": "a"}\n{"text":', ["eval.prompts=bad.jsonl"], "bad.jsonl:2: expected a JSON record"),
        (LONG, ["eval.prompts=bad.jsonl"], "bad.jsonl:1: the prompt has"),
        (b"", ["eval.max_prompt_tokens=2"], "tokens where at most 2 fit; raise eval.max_prompt_tokens, or leave"),
        (b"", ["eval.max_prompt_tokens=2", "eval.skip_long=true"], "no prompt of at most 2 tokens"),
        (LONG, ["eval.prompts=bad.jsonl", "eval.max_prompt_tokens=5000"], "need 1814 positions, the target has 512"),
    ],
)
def test_data_and_prompts(data: bytes, changes: list[str], fault: str, here: Path, refused: Any) -> None:
    (here / "bad.jsonl").write_bytes(data)
    assert fault in refused(lambda: train(*changes))


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("truncated", "no causal language model with safetensors weights can be loaded"),
        ("not finite", "not finite after the last layer, and model.norm.weight holds such values; its weights are"),
        ("pickled", "pickled weights (.bin) are not read"),
        ("misdescribed", "lm_head.weight is [128, 32] in its weights, and config.json describes [96, 32]"),
        ("another's tokenizer", "its tokenizer has 128 tokens and its output head 100; put the model's own"),
        ("another's weights", "with fingerprint of the weights"),
        ("shallow", "too shallow for the default auxiliary layers"),
    ],
)
def test_targets(kind: str, fault: str, here: Path, tiny_target_dir: Path, refused: Any) -> None:
    path = here / "other"
    if kind in ("truncated", "not finite", "pickled", "misdescribed"):
        shutil.copytree(tiny_target_dir, path)
    if kind == "truncated":
        (path / WEIGHTS).write_bytes((path / WEIGHTS).read_bytes()[:5000])
    elif kind == "pickled":
        (path / WEIGHTS).rename(path / "pytorch_model.bin")
    elif kind == "misdescribed":
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"vocab_size": 96}))
    elif kind == "not finite":
        change_weights(path, model__norm__weight=torch.full((32,), torch.nan))
    else:
        sizes = {"another's tokenizer": {"vocab_size": 100}, "shallow": {"num_hidden_layers": 2}}
        make_target(path, tiny_target_dir, **sizes.get(kind, {}))
    if kind != "another's weights":
        assert fault in refused(lambda: train("target.path=other"))
    if kind != "shallow":
        assert fault in refused(lambda: measure("run", "--target", "other"))


@pytest.mark.parametrize(
    ("name", "data", "fault"),
    [
        ("generation_config.json", b"{", "other/generation_config.json: cannot be read (Expecting property name"),
        ("generation_config.json", b"\xff", "other/generation_config.json: cannot be read ('utf-8' codec"),
        (
            "generation_config.json",
            b"[]",
            "other/generation_config.json: expected a JSON object, got list; replace it, or",
        ),
        ("tokenizer_config.json", b"{", "replace its tokenizer files"),
        ("tokenizer.json", b"{", "replace its tokenizer files"),
    ],
)
def test_a_target_s_small_files_are_read_or_refused(
    name: str, data: bytes, fault: str, here: Path, tiny_target_dir: Path, refused: Any
) -> None:
    """A damaged generation_config.json must be refused: transformers ignores it, and texts would end elsewhere."""
    shutil.copytree(tiny_target_dir, here / "other")
    (here / "other" / name).write_bytes(data)
    assert fault in refused(lambda: measure("run", "--target", "other"))


def test_a_target_that_was_moved_can_be_named(here: Path, tiny_target_dir: Path, refused: Any) -> None:
    file = here / "run/head/config.json"
    config = json.loads(file.read_text())
    config["draftsmith"]["target"]["name"] = "moved/from/here"
    file.write_text(json.dumps(config))
    fault = "moved/from/here: no such folder; run/head names it as its target: give another copy with --target"
    assert fault in refused(lambda: measure("run"))
    assert measure("run", "--target", str(tiny_target_dir)) == 0


def test_a_target_in_half_precision_is_given_what_fits(here: Path, tiny_target_dir: Path, refused: Any) -> None:
    """bfloat16 keeps small weights that float16 rounds to zero."""
    shutil.copytree(tiny_target_dir, here / "faint")
    model = LlamaForCausalLM.from_pretrained(tiny_target_dir)
    model.model.layers[0].mlp.down_proj.weight.data.mul_(1e-6)
    model.save_pretrained(here / "faint")
    assert train("target.path=faint", "output_dir=faint-run") == 0
    assert measure("faint-run", "--dtype", "bfloat16") == 0
    shutil.rmtree(here / "out")
    assert "error: faint-run/head: float16 cuts small weights of the target off: " in refused(
        lambda: measure("faint-run", "--dtype", "float16")
    )


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (["--nonsense"], "unrecognized arguments: --nonsense; see --help"),
        (["--num-prompts", "x"], "--num-prompts: expected a whole number, got 'x'"),
        (["--num-prompts", "0"], "--num-prompts: expected at least 1, got 0"),
        (["--seed", "-1"], "--seed: expected at least 0, got -1"),
        (["--tree", "chain"], "--tree: tree 'chain'"),
        (["--tree", "none"], "--tree: expected trees that draft something"),
        (["--temperature", "warm"], "--temperature: expected numbers separated by commas"),
        (["--temperature", "-1"], "--temperature: temperature: expected 0 (greedy) or"),
        (["--temperature", "1", "--top-p", "2"], "top_p: expected a share"),
        (["--top-k", "5"], "--top-k: has no effect at --temperature 0"),
        (["--rule", "typical"], "--rule: invalid choice: 'typical'"),
        (["--rule", "ratio"], "--rule: has no effect at --temperature 0"),
        (["--device", "gpu"], "--device: expected a device of this machine, such as cpu, got 'gpu'"),
        (["--device", "meta"], "--device: expected a device of this machine"),
        (["--max-new-tokens", "600"], "leave no room for a prompt in the 512 positions"),
        (["--max-prompt-tokens", "2"], "prompts.jsonl:1: the prompt has"),
        (["--prompts", "no.jsonl"], "no.jsonl: no such file, and no suite of that name"),
        (["--out", "prompts.jsonl/x"], "--out prompts.jsonl/x: expected a folder"),
        (["--out", "results.json"], "--out results.json: expected a folder, which holds several files"),
        (["--prompts", "prompts.jsonl,"], "--prompts 'prompts.jsonl,': expected suites or files, separated by commas"),
        (["--max-new-tokens", "1"], "prompts: every output ended with its first token"),
        (["--max-new-tokens", "1", "--tree", "auto"], "--tree auto: every output of the 2 prompts tried ended with"),
    ],
)
def test_options_of_the_bench(options: list[str], fault: str, refused: Any) -> None:
    assert fault in refused(lambda: measure("run", *options))


def test_the_readme_of_something_else_is_not_replaced(here: Path, refused: Any) -> None:
    (here / "README.md").write_text("# My project")
    assert "--out .: holds a README.md of something else" in refused(lambda: measure("run", "--out", "."))
    assert "output_dir .: holds a README.md of something else" in refused(lambda: train("output_dir=."))
    shutil.copy(here / "run/results.json", here)
    assert "holds a README.md of something else" in refused(lambda: exit_status(lambda: report.main([str(here)])))


def test_an_output_dir_in_use(here: Path, refused: Any) -> None:
    (here / "busy").mkdir()
    handle = os.open(here / "busy/.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_EX)
    os.write(handle, b"123")
    assert "output_dir busy: in use by process 123" in refused(lambda: train("output_dir=busy"))
    os.close(handle)


@pytest.mark.parametrize("path", ["prompts.jsonl", "prompts.jsonl/x", "/proc/x", "x" * 300, '"a\\0b"'])
def test_an_output_dir_that_cannot_be(path: str, refused: Any) -> None:
    assert "name another" in refused(lambda: train(f"output_dir={path}"))


def test_a_link_to_nowhere_is_named(here: Path, refused: Any) -> None:
    (here / "linked").symlink_to("gone")
    assert "linked is a link to gone, which is not there" in refused(lambda: train("output_dir=linked/run"))


@pytest.mark.parametrize(
    ("head", "fault"),
    [
        ("lokup:3", "did you mean lookup:3?"),
        ("early", "this run has no head yet, after step 1; the first is saved when tau is measured"),
        ("prompts.jsonl", "no head there; expected a folder with"),
    ],
)
def test_what_is_no_head_is_given_what_it_may_be(head: str, fault: str, here: Path, refused: Any) -> None:
    (here / "early").mkdir()
    (here / "early/recipe.yaml").write_text("output_dir: early\n")
    (here / "early/metrics.jsonl").write_text('{"kind": "train", "step": 1}\n')
    assert fault in refused(lambda: measure(head))


@pytest.mark.parametrize(("number", "is_full"), [(errno.EACCES, False), (errno.ENOSPC, True)])
def test_space_is_asked_for_where_there_is_none(number: int, is_full: bool) -> None:
    with pytest.raises(UserError, match="cache: cannot be written to") as caught, unwritable(Path("cache")):
        raise OSError(number, os.strerror(number))
    assert ("free space" in str(caught.value)) == is_full


def test_a_disk_that_is_full_names_the_head(here: Path) -> None:
    head, target = load_head("run"), read_config(here / "run/head")["target"]
    with small_files(1000), pytest.raises(UserError, match=r"new/head: no space left on the device for the head; free"):
        save_head(head, here / "new/head", target=target)


def test_a_comparison_is_not_rendered_again(here: Path, refused: Any) -> None:
    (here / "out").mkdir()
    (here / "out/compare.json").write_text('{"schema_version": 1}')
    for path in (here / "out", here / "out/compare.json"):
        assert "by comparing again" in refused(lambda path=path: exit_status(lambda: report.main([str(path)])))


def test_a_run_with_other_settings(refused: Any) -> None:
    assert "train.lr was 0.01, is 0.02" in refused(lambda: train("output_dir=run", "train.lr=0.02"))


def test_nothing_to_draft_is_given_at_the_first_measurement(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tau that is NaN would stay the best one."""
    assert train("eval.max_new_tokens=1", "train.eval_every=1") == 2
    assert "prompts.jsonl: every output ended with its first token" in capsys.readouterr().err.splitlines()[-1]
    assert not (here / "a/b/new/head").exists()


def test_results_are_of_the_head_that_lies_there_and_of_the_settings_asked_for(here: Path) -> None:
    def measured() -> dict[str, Any]:
        return {key: read_results(here / "run/results.json")[key] for key in ("head", "settings")}

    first = measured()
    assert train("output_dir=run", "train.log_every=2") == 0
    assert measured() == first
    assert train("output_dir=run", "eval.report.temperatures=[0, 1]") == 0
    assert measured()["settings"]["temperatures"] == [0.0, 1.0]
    shutil.rmtree(here / "run/checkpoints")  # so that the run starts again
    forget_accelerator()
    assert train("output_dir=run", "eval.report.temperatures=[0, 1]", "train.lr=0.02") == 0
    again = read_config(here / "run/head")["sha256"]
    assert measured()["head"]["sha256"] == again != first["head"]["sha256"]


def test_a_head_that_was_damaged_is_neither_finished_nor_measured(here: Path, refused: Any) -> None:
    file = here / "run/head" / WEIGHTS
    file.write_bytes(file.read_bytes()[:-100])
    assert f"run/head/{WEIGHTS}: truncated or damaged" in refused(lambda: train("output_dir=run"))
    assert f"run/head/{WEIGHTS}: truncated or damaged" in refused(measure)
    (here / "run/head/config.json").write_text("{}")
    assert "run/head/config.json" in refused(measure)


def test_results_that_were_damaged_are_measured_again(here: Path) -> None:
    (here / "run/results.json").write_text("{")
    assert train("output_dir=run") == 0
    assert read_results(here / "run/results.json")["exact"]["divergences"] == []


def test_a_report_that_was_cut_off_is_written_by_the_same_command(here: Path) -> None:
    for name in ("README.md", "report.html"):
        (here / "run" / name).unlink()
    assert train("output_dir=run") == 0
    assert (here / "run/README.md").is_file() and (here / "run/report.html").is_file()


@pytest.mark.parametrize("path", ["/no/such/target", "./runs/target", "no/such/target", "~/target", "a b"])
def test_what_cannot_be_a_hub_id_is_a_missing_folder(path: str, refused: Any) -> None:
    said = refused(lambda: train(f"target.path={path}"))
    assert "no such folder; expected one with config.json, or a hub id" in said
