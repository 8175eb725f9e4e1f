"""Users' errors: exit status 2 and one clear line, nothing written and nothing lost; never a traceback."""

import copy
import fcntl
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from eval import bench, report
from eval.core.command_line import exit_status
from heads.core.files import file_hash
from heads.saved import read_config
from tests.support.annotations import Capture, Log, Patch
from tests.support.native_mtp import change_config
from tests.support.runs import forget_accelerator
from train.entry import attempt

WEIGHTS = "model.safetensors"
BAD = "data.sources.0.path=bad.jsonl"
PROMPTS = "eval.prompts=bad.jsonl"


@pytest.fixture
def here(tiny_run: Path, tmp_path: Path, monkeypatch: Patch) -> Iterator[Path]:
    """A copy of a finished run with its recipe and data, as the current folder."""
    shutil.copytree(tiny_run, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    forget_accelerator()
    yield tmp_path
    forget_accelerator()


@pytest.fixture
def refused(here: Path, capsys: Capture) -> Callable[[Callable[[], int]], str]:
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


LONG = b'{"text": "%s"}\n' % (b"sea " * 600)
IMAGE = b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}\n'


@pytest.mark.parametrize(
    ("change", "named", "data"),
    [
        ("trian.max_steps=3", "did you mean 'train'?", b""),
        ("output_dir=run train.lr=0.02", "train.lr was 0.01, is 0.02", b""),
        ("output_dir=run train.eval_points=3", "train.eval_points was 8, is 3", b""),
        ("output_dir=run eval.prompts=python-heldout", "is 'python-heldout'", b""),
        ("head.aux_layer_ids=[] data.sources.0.path=no.jsonl", "head.aux_layer_ids", b""),  # before any data is read
        ("head.depth=48", "head.depth", b""),
        ("data.sources.0.path=no.jsonl", "no.jsonl: no such file", b""),
        ("data.sources.0.path=run/head/config.json", "run/head/config.json:1", b""),
        ("data.context_length=4096", "at most 512", b""),
        ("eval.prompts=mt-bench", "mt-bench: no such file, and no suite of that name", b""),
        ("eval.max_prompt_tokens=2 eval.skip_long=true", "no prompt of at most 2 tokens", b""),
        ("target.path=~/target", "no such folder; expected one with config.json, or a Hub id", b""),
        ("output_dir=/proc/x", "output_dir", b""),
        ("output_dir=.", "holds a README.md of something else", b""),
        ("output_dir=linked/run", "linked is a link to gone, which is not there", b""),
        (BAD, "bad.jsonl:1: expected a record with 'text', got keys txt", b'{"txt": "a"}\n'),
        (BAD, "no token to train on: every document is too short", b'{"text": "a"}\n'),
        (BAD, "bad.jsonl:2: expected UTF-8 text", b'{"text": "a"}\n{"text": "\\ud83d"}\n'),
        (f"{BAD} data.sources.0.kind=chat", "content parts of type text, got type 'image_url'", IMAGE),
        (PROMPTS, "bad.jsonl:1: the prompt has", LONG),
        (f"{PROMPTS} eval.max_prompt_tokens=5000", "need 1814 positions, the target has 512", LONG),
    ],
)
def test_a_recipe_and_its_data(change: str, named: str, data: bytes, here: Path, refused: Any) -> None:
    (here / "README.md").write_text("# My project")
    (here / "linked").symlink_to("gone")
    (here / "bad.jsonl").write_bytes(data)
    assert named in refused(lambda: train(*change.split()))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--nonsense", "unrecognized arguments: --nonsense; see --help"),
        ("--num-prompts 0", "--num-prompts"),
        ("--tree chain:0", "--tree: tree 'chain:0': a chain has at least 1 draft token"),
        ("--tree chain:2,chain:9", "--tree chain:9: drafts 9 tokens a round, more than the 8 of an answer"),
        ("--temperature 1 --top-p 2", "--top-p"),
        ("--top-k 5", "--top-k: has no effect at --temperature 0"),
        ("--rule ratio", "--rule: has no effect at --temperature 0"),
        ("--sampling model --temperature 0", "--temperature: --sampling model takes it from the target"),
        ("--sampling model --min-p 0", "--min-p: --sampling model takes it from the target"),
        ("--sampling model --repetition-penalty 1.1", "--repetition-penalty: --sampling model takes it from"),
        ("--repetition-penalty 0", "--repetition-penalty"),
        ("--presence-penalty 2.5", "--presence-penalty"),
        ("--device meta", "--device"),
        ("--plain-server http://localhost:1", "--plain-server: requires --server"),
        ("--server http://localhost:1 --tree chain:2", "--tree: not supported with --server"),
        ("--max-new-tokens 600", "leave no room for a prompt in the 512 positions"),
        ("--max-prompt-tokens 2", "prompts.jsonl:1"),
        # Before the target is loaded.
        ("--prompts no.jsonl --target none", "no.jsonl: no such file, and no suite of that name"),
        ("--out /proc/x", "--out /proc/x: cannot be written to"),
        ("--out .", "--out .: holds a README.md of something else"),
        ("--max-new-tokens 1 --tree chain:1", "prompts: every output ended with its first token"),
    ],
)
def test_options_of_the_bench(options: str, named: str, here: Path, refused: Any) -> None:
    (here / "README.md").write_text("# My project")
    assert named in refused(lambda: measure("run", *options.split()))


def make_other(folder: Path, **changes: Any) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        LlamaForCausalLM(LlamaConfig.from_pretrained(folder, **changes)).save_pretrained(folder)


TARGETS: dict[str, tuple[Callable[[Path], object], str]] = {
    "another's tokenizer": (lambda to: make_other(to, vocab_size=100), "its tokenizer has 128 tokens"),
    "another's depth": (lambda to: make_other(to, num_hidden_layers=4), "with number of layers 8, but other has 4"),
    # transformers would ignore it, and texts would end elsewhere.
    "damaged generation_config": (lambda to: (to / "generation_config.json").write_text("{"), "generation_config.json"),
}


@pytest.mark.parametrize("kind", TARGETS)
def test_targets(kind: str, here: Path, tiny_target_dir: Path, refused: Any) -> None:
    spoil, named = TARGETS[kind]
    shutil.copytree(tiny_target_dir, here / "other")
    spoil(here / "other")
    if kind != "another's depth":
        assert named in refused(lambda: train("target.path=other"))
    assert named in refused(lambda: measure("run", "--target", "other"))


def test_a_target_that_was_moved_can_be_named(here: Path, tiny_target_dir: Path, refused: Any) -> None:
    record = read_config(here / "run/head")
    change_config(here / "run/head", draftsmith=record | {"target": record["target"] | {"name": "moved/from/here"}})
    fault = "moved/from/here: no such folder; run/head names it as its target: give another copy with --target"
    assert fault in refused(measure)
    assert measure("run", "--target", str(tiny_target_dir)) == 0


def test_half_precision_that_cuts_weights_off_is_said(here: Path, tiny_target_dir: Path, caplog: Log) -> None:
    """bfloat16 keeps small weights that float16 rounds to zero."""
    model = LlamaForCausalLM.from_pretrained(tiny_target_dir)
    model.model.layers[0].mlp.down_proj.weight.data.mul_(1e-6)
    shutil.copytree(tiny_target_dir, here / "faint")
    model.save_pretrained(here / "faint")
    assert train("target.path=faint", "output_dir=faint-run") == 0
    assert measure("faint-run", "--dtype", "bfloat16") == 0
    shutil.rmtree(here / "out")
    caplog.clear()
    assert measure("faint-run", "--dtype", "float16") == 0
    assert "other weights" in caplog.text and "cut off by float16" in caplog.text


def test_what_is_no_head_is_given_what_it_may_be(here: Path, refused: Any) -> None:
    (here / "early").mkdir()
    (here / "early/recipe.yaml").write_text("output_dir: early\n")
    (here / "early/metrics.jsonl").write_text('{"kind": "train", "step": 1}\n')
    assert "this run has no head yet" in refused(lambda: measure("early"))
    assert "did you mean lookup:3?" in refused(lambda: measure("lokup:3"))
    assert "no head there; expected a folder with" in refused(lambda: measure("prompts.jsonl"))


def test_an_output_dir_in_use(here: Path, refused: Any) -> None:
    (here / "busy").mkdir()
    handle = os.open(here / "busy/.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_EX)
    os.write(handle, b"123")
    assert "output_dir busy: in use by process 123" in refused(lambda: train("output_dir=busy"))
    os.close(handle)


def test_a_damaged_comparison_is_refused(here: Path, refused: Any) -> None:
    (here / "out").mkdir()
    (here / "out/compare.json").write_text('{"schema_version": 1}')
    for path in (here / "out", here / "out/compare.json"):
        assert "expected a results.json" in refused(lambda path=path: exit_status(lambda: report.main([str(path)])))


def test_nothing_to_draft_is_given_at_the_first_measurement(here: Path, capsys: Capture) -> None:
    """A tau that is NaN would stay the best one."""
    assert train("eval.max_new_tokens=1", "train.warmup_steps=1") == 2
    assert "prompts.jsonl: every output ended with its first token" in capsys.readouterr().err.splitlines()[-1]
    assert not (here / "a/b/new/head").exists()


def test_results_are_of_the_head_that_is_there_and_of_the_settings_asked_for(here: Path) -> None:
    def measured() -> dict[str, Any]:
        results = json.loads((here / "run/results.json").read_text())
        return {key: results[key] for key in ("head", "settings")}

    first = measured()
    assert train("output_dir=run", "train.log_every=2") == 0
    assert measured() == first
    for name in ("results.json", "README.md", "report.html"):  # lost ones are made again
        (here / "run" / name).write_text("{") if name == "results.json" else (here / "run" / name).unlink()
    assert train("output_dir=run", "eval.report.temperature=[0, 1]") == 0
    assert measured()["settings"]["temperatures"] == [0.0, 1.0]
    assert (here / "run/README.md").is_file() and (here / "run/report.html").is_file()
    shutil.rmtree(here / "run/checkpoints")  # so that the run starts again
    forget_accelerator()
    assert train("output_dir=run", "eval.report.temperature=[0, 1]", "train.lr=0.02") == 0
    again = read_config(here / "run/head")["sha256"]
    assert measured()["head"]["sha256"] == again != first["head"]["sha256"]


def test_no_memory_is_the_users_to_mend(capsys: Capture) -> None:
    assert exit_status(lambda: len(torch.empty(2**50))) == 2
    assert capsys.readouterr().err.startswith("error: out of memory (")


def test_a_library_that_cannot_be_imported_is_named(capsys: Capture) -> None:
    def main() -> int:
        raise ImportError("libx.so.1: cannot open shared object file", name="torch._C")

    assert exit_status(main) == 2
    assert capsys.readouterr().err.startswith("error: torch cannot be imported (libx.so.1: cannot open")


ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 10**30, 10**400, float("nan"), 1e300, "", "x", "a\nb", "\ud800", "{{ 1 }}", "../.."),
    *("x" * 300, [], {}, [None], {"a": {"b": [1, {"c": None}]}}),
)


def damaged(value: Any, rng: random.Random) -> Any:
    """Return a JSON value of which one entry, anywhere in it, is gone or odd."""
    places, whole = [], [copy.deepcopy(value)]
    pending: list[Any] = [whole]
    while pending:
        holder = pending.pop()
        for key in range(len(holder)) if isinstance(holder, list) else list(holder):
            places.append((holder, key))
            pending += [holder[key]] if isinstance(holder[key], list | dict) else []
    holder, key = rng.choice(places)
    if rng.random() < 0.3 and holder is not whole:
        del holder[key]
    else:
        holder[key] = copy.deepcopy(rng.choice(ODD))
    return whole[0]


def damage(file: Path, rng: random.Random) -> None:
    """Damage a file, as other programs, editors and lost blocks do: a setting, a header, or some bytes."""
    data = bytearray(file.read_bytes())
    size = int.from_bytes(data[:8], "little") + 8 if file.suffix == ".safetensors" else 0
    if file.suffix == ".json" and rng.random() < 0.8:
        file.write_text(json.dumps(damaged(json.loads(data), rng)))
    elif size and rng.random() < 0.5:
        header = json.dumps(damaged(json.loads(data[8:size]), rng)).encode()
        file.write_bytes(len(header).to_bytes(8, "little") + header + data[size:])
    elif rng.random() < 0.5:
        file.write_bytes(data[: rng.randrange(len(data))])
    else:
        data[rng.randrange(min(len(data), size or len(data)))] ^= 1 << rng.randrange(8)
        file.write_bytes(data)


def vouch(file: Path) -> None:
    """Make the record beside a file agree with it."""
    if file.name == WEIGHTS:
        change_config(file.parent, draftsmith=read_config(file.parent) | {"sha256": file_hash(file)})
    elif (manifest := file.with_name("manifest.json")).is_file():
        entry = {file.name: {"bytes": file.stat().st_size, "sha256": file_hash(file)}}
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | entry))


COMMANDS: dict[str, Callable[[], int]] = {
    "recipe.yaml": train,
    "data.jsonl": train,
    "prompts.jsonl": measure,
    "run/head/config.json": measure,
    f"run/head/{WEIGHTS}": measure,
    "run/results.json": lambda: exit_status(lambda: report.main(["run"])),
    "run/checkpoints/step-1/state.json": lambda: train("output_dir=run", "train.max_steps=2"),
    "target/config.json": lambda: measure("run", "--target", "target"),
    "target/tokenizer.json": lambda: measure("run", "--target", "target"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 30), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("name", COMMANDS)
def test_no_damaged_file_is_a_traceback(
    name: str, seeds: range, here: Path, tiny_target_dir: Path, tmp_path_factory: Any, capsys: Any
) -> None:
    """Each is refused, or its damage does no harm."""
    if name.startswith("target"):
        shutil.copytree(tiny_target_dir, here / "target")
    if name.startswith("run/checkpoints"):
        shutil.rmtree(here / "run/checkpoints/step-2")
    sound = shutil.copytree(here, tmp_path_factory.mktemp("sound") / "all")
    for seed in seeds:
        shutil.copytree(sound, here, dirs_exist_ok=True)
        damage(here / name, random.Random(f"{name} {seed}"))
        vouch(here / name)
        forget_accelerator()
        capsys.readouterr()
        status, said = COMMANDS[name](), capsys.readouterr().err
        assert (status, "error: " in said) in ((0, False), (2, True)) and "Traceback" not in said, f"{seed}: {said}"
        for made in ("a", "out"):
            shutil.rmtree(here / made, ignore_errors=True)
