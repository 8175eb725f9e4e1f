"""Tests of the pages: every command parses and runs, every path exists, every table is that of its records.

A `bash` block whose first line is a comment `# needs ...` is parsed but not run. Other commands run in a copy of the
checkout, shortened with the options in TINY.
"""

import io
import json
import re
import shlex
import sys
from collections.abc import Iterator
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml

from eval.core.command_line import exit_status
from eval.data.conversation_forms import read_chat
from eval.data.data_files import read_records
from eval.records.measure_settings import to_settings
from eval.sweep import Sweep
from heads.core.engines import ENGINES, VLLM
from heads.core.serve_commands import Setting
from heads.foreign.published_blocks import SCALED
from heads.formats.medusa import OLD_VLLM
from heads.formats.target_classes import SGLANG_BLOCK_TARGETS, SGLANG_TARGETS, VLLM_TARGETS
from heads.methods.method_settings import TITLES
from heads.registry import HEADS, build_head
from heads.saved import save_head, target_record
from heads.targets.load import load_target
from heads.targets.target_files import load_tokenizer
from scripts import draw_rooms
from scripts.write_pages import CURVES, MARK, PICTURE, RESULTS, curve_chart
from scripts.write_pages import pages as generated
from tests.conftest import small_recipe
from tests.support.annotations import Capture, Patch
from tests.support.chats import encode_chat
from tests.support.runs import forget_accelerator
from tests.support.switches import forget_library
from train.entry import attempt, parse_arguments
from train.plan.derive import begin
from train.recipe.recipe import KINDS, checked, load_recipe

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("heads", "eval", "train", "recipes", "scripts", "tests")
FIRST = ROOT / "README.md"
# Commands run in this order.
PAGES = [FIRST, ROOT / "eval/results/README.md", ROOT / "eval/results/LAB.md"]
PAGES += sorted({page for name in FOLDERS for page in (ROOT / name).rglob("README.md")} - {*PAGES})
PAGES += [ROOT / ".github" / name for name in ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")]
USED = [page for page in PAGES if page.parent.name != "target" and page.name != "CHANGELOG.md"]
"""The pages for use."""
MARKED = re.compile(r"<!-- table.*?<!-- end -->", re.DOTALL)
"""A table that is written from records."""
ELSEWHERE = {
    **dict.fromkeys(("python3", ".", "pip", "pytest", "ruff", "mypy"), ".ci/run"),
    "scripts/gpu_check.py": "tests/scripts/test_gpu_check.py",
}
"""Program -> the file that runs it."""
TRAIN = (
    "train.max_steps=2 train.warmup_steps=1 train.checkpoint_every=2 data.sources.0.limit=20 "
    "data.context_length=96 eval.num_prompts=2 eval.max_prompt_tokens=32 eval.max_new_tokens=4 eval.tree=chain:2 "
    "eval.report.num_prompts=2 eval.report.max_new_tokens=4 eval.report.repeats=1 eval.report.temperature=[0] "
    "eval.report.tree=[chain:2]"
)
ANSWERS = "data.regenerate.prompts=4 data.regenerate.prompt_tokens=16 data.regenerate.new_tokens=4"
MEASURE = "--num-prompts 2 --max-prompt-tokens 32 --max-new-tokens 7 --repeats 1"
TINY = {
    # The initial weights of blocks come from a long text.
    **{f"train/{kind}.py": f"{TRAIN} head.initial_weights=random" for kind in ("dflash", "dflash2", "dspark")},
    "train/": TRAIN,
    "scripts/regenerate.py": ANSWERS,
    "scripts/cache_features.py": f"{TRAIN} data.regenerate=null data.sources.0.limit=2",
    "eval/bench.py": MEASURE,
    "eval/sweep.py": "--count 1",
    "eval/chat.py": "--max-new-tokens 4",
    "scripts/bench_generate.py": "--num-prompts 1 --max-new-tokens 4 --repeats 1",
}
"""Program -> options that make it fast."""


class Command(NamedTuple):
    page: str
    text: str
    needs: str | None

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text)

    @property
    def program(self) -> str:
        """The file in the checkout that runs, or the name of an external program."""
        return next((word for word in self.words if word.endswith(".py")), self.words[0])

    @property
    def arguments(self) -> list[str]:
        return self.words[self.words.index(self.program) + 1 :]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def commands_of(page: Path) -> Iterator[Command]:
    """Yield the commands in the `bash` blocks and in sentences."""
    text = page.read_text(encoding="utf-8")
    for block in blocks(page, "bash"):
        needs = re.match(r"# (needs .*)\n", block)
        for line in block.replace("\\\n", " ").splitlines():
            for command in line.split(" && "):
                if not command.startswith("#"):
                    yield Command(str(page.relative_to(ROOT)), command.strip(), needs and needs[1])
    for command in re.findall(r"`((?:accelerate launch .*|python )\w+/\w+\.py [^`]+)`", text):
        yield Command(str(page.relative_to(ROOT)), command, None)


COMMANDS = list(dict.fromkeys(command for page in PAGES for command in commands_of(page)))
OURS = [command for command in COMMANDS if command.program.endswith(".py")]
ONCE = {command.text: command for command in reversed(OURS)}
RUN = [c for c in OURS if c is ONCE[c.text] and c.needs is None and c.program not in ELSEWHERE]


@pytest.mark.parametrize("command", OURS, ids=lambda command: f"{command.page}: {command.text}")
def test_a_command_is_understood(command: Command, monkeypatch: Patch) -> None:
    monkeypatch.chdir(ROOT)
    assert (ROOT / command.program).is_file(), f"{command.page} runs {command.program}, which is not there"
    if command.arguments == ["--help"]:
        return
    if command.program.startswith("train/") or command.program == "scripts/regenerate.py":
        options = parse_arguments(command.arguments)
        if options.model:
            assert checked(begin(options, KINDS[Path(command.program).stem]))
        else:
            assert load_recipe(options.overrides[0], options.overrides[1:])
    elif command.program == "scripts/cache_features.py":
        assert load_recipe(command.arguments[0], command.arguments[1:])
    else:
        module: Any = import_module(command.program.removesuffix(".py").replace("/", "."))
        options = module.parse_arguments(command.arguments)
        if command.program == "eval/bench.py":
            assert to_settings(options)


def test_every_command_of_others_is_run_elsewhere_or_needs_what_is_not_here() -> None:
    others = [command for command in COMMANDS if command not in OURS and command.needs is None]
    assert all(command.program in (*ELSEWHERE, ".ci/run") for command in others), others
    for program, place in ELSEWHERE.items():
        assert Path(program).stem in (ROOT / place).read_text(), f"{place} does not run {program}"


def test_every_run_that_is_named_is_made_by_some_command() -> None:
    recipes = (ROOT / "recipes").glob("*.yaml")
    made = {yaml.safe_load(path.read_text())["output_dir"] for path in recipes}
    for command in OURS:
        made |= {word.removeprefix("output_dir=") for word in command.words if word.startswith("output_dir=runs/")}
    for page in PAGES:
        text = "\n".join([*blocks(page, "bash"), *blocks(page, "python")])
        for run in re.findall(r"(?<!=)\bruns/[\w.-]+", text):
            assert run in made, f"{page.relative_to(ROOT)}: no command makes {run}"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with links to the checkout's folders, in which runs are written."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in FOLDERS:
        (folder / name).symlink_to(ROOT / name)
    return folder


def start(program: str, arguments: list[str]) -> int:
    if program.startswith("train/"):
        return attempt(Path(program).stem, arguments)
    module: Any = import_module(program.removesuffix(".py").replace("/", "."))
    return exit_status(lambda: module.main(arguments))


def marked(command: Command) -> Any:
    """Return a command as a slow test if it starts processes, or makes a record and no run that another page names."""
    record = not command.program.startswith("train/") or "output_dir=" in command.text
    slow = command.program == "eval/sweep.py" or (command.page.startswith("eval/results/") and record)
    return pytest.param(command, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize("command", [*map(marked, RUN)], ids=lambda command: f"{command.page}: {command.text}")
def test_a_command_runs(command: Command, checkout: Path, monkeypatch: Patch, capsys: Capture) -> None:
    # In order, as a reader would run them: later commands measure what earlier ones trained.
    monkeypatch.chdir(checkout)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setattr(sys, "argv", [command.program])
    for name, value in (
        word.split("=", 1) for word in command.words[: command.words.index(command.program)] if "=" in word
    ):
        monkeypatch.setenv(name, value)
        forget_library()
    extra = next((options for program, options in TINY.items() if command.program.startswith(program)), "")
    if command.program.startswith("train/") and "data.regenerate=null" not in command.words:
        extra += f" {ANSWERS}"
    forget_accelerator()
    status = start(command.program, [*command.arguments, *extra.split()])
    forget_library()
    assert status == 0, capsys.readouterr().err


def test_the_program_in_python_runs(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    (program,) = (block for page in PAGES for block in blocks(page, "python") if "Engine(" in block)
    assert len([line for line in program.splitlines() if line]) <= 12
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)
    target = load_target("recipes/quickstart/target")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        head = build_head("eagle3", {"draft_vocab_size": 256}, target, torch.ones(target.vocab_size))
    save_head(head, tmp_path / "runs/quickstart/head", target=target_record(target))
    exec(compile(program, "the program", "exec"), {})
    assert re.search(r"^\d\.\d\d tokens per pass$", capsys.readouterr().out, re.MULTILINE)


def test_training_from_python_runs(
    tiny_target_dir: Path, tmp_path: Path, without_charts: None, monkeypatch: Patch, capsys: Capture
) -> None:
    (program,) = (block for page in PAGES for block in blocks(page, "python") if "train(" in block)
    recipe = small_recipe(tmp_path, tiny_target_dir)
    recipe["train"] |= {"log_every": 50, "checkpoint_every": 100}
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/quickstart.yaml").write_text(yaml.safe_dump(recipe))
    monkeypatch.chdir(tmp_path)
    forget_accelerator()
    exec(compile(program, "the program", "exec"), {})
    tau = json.loads((tmp_path / "runs/short/results.json").read_text())["tau"]["mean"]
    assert capsys.readouterr().out.endswith(f"\ntau {tau:.2f}\n")


@pytest.mark.parametrize("page", [FIRST, ROOT / "train/README.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_every_conversation_that_is_shown_gives_labels(page: Path, tiny_target_dir: Path, tmp_path: Path) -> None:
    (example,) = blocks(page, "json")
    (tmp_path / "chats.jsonl").write_text(example)
    records = list(read_records(str(tmp_path / "chats.jsonl")))
    assert len(records) == len(example.splitlines())
    tokenizer = load_tokenizer(str(tiny_target_dir))
    for record in records:
        (document,) = encode_chat(tokenizer, read_chat(record).messages)
        assert 0 < document.labels.sum() < len(document.labels)


@pytest.mark.parametrize("chats", [4, pytest.param(200, marks=pytest.mark.slow)])
def test_a_recipe_trains_another_model_on_other_data(
    chats: int, tiny_target_dir: Path, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    # The target's template knows no arguments. The options only make the run small: none mends a setting.
    (command,) = (command for command in OURS if "target.path=OWNER/MODEL" in command.text)
    recipe, *overrides = command.arguments
    overrides = [override.replace("OWNER/MODEL", str(tiny_target_dir)) for override in overrides]
    (example,) = blocks(FIRST, "json")
    lines = example.splitlines() * 200
    (tmp_path / "chats.jsonl").write_text("\n".join(lines[:chats]))
    (tmp_path / "held-out.jsonl").write_text(example)
    sizes = "data.context_length=192 train.batch_size=8 train.tokens_per_step=1536 data.regenerate.new_tokens=8"
    sizes += " eval.max_new_tokens=8 eval.report.max_new_tokens=8 eval.report.repeats=1 eval.report.tree=[chain:2]"
    monkeypatch.chdir(tmp_path)
    words = [str(ROOT / recipe), *overrides, *sizes.split()]
    forget_accelerator()  # other tests' precision
    assert attempt("eagle", words) == 0
    assert json.loads((tmp_path / "runs/mine/results.json").read_text())["settings"]["prompts"] == "held-out.jsonl"
    said = capsys.readouterr().err
    assert "left out enable_thinking" in said and f"data.regenerate: {chats} conversations to answer\n" in said
    ((steps, epochs),) = re.findall(r"^[\d,]+ rows: (\d+) steps of 1,536 tokens are (\S+) epochs", said, re.MULTILINE)
    assert 8 <= float(epochs) < 8 + 8 and f"the warm-up takes {int(steps) // 5} steps" in said
    assert attempt("eagle", words) == 0 and f"finished already, {steps} steps" in capsys.readouterr().err


def engine_words(kind: str, engine: str) -> list[str]:
    """Return the command that serves the head of the first page's recipe, as if it were of this kind."""
    command = HEADS[kind].format.readers.get(engine)
    setting = Setting(target="Qwen/Qwen3-8B", head="runs/eagle3-qwen3-8b/head", steps=5)
    return shlex.split(command(setting, {})) if command else []


def test_the_words_for_engines_are_those_of_the_loader_contract() -> None:
    served = [c.words for c in COMMANDS if "--speculative-" in c.text and "extract_hidden_states" not in c.text]
    assert served == [engine_words("eagle3", VLLM)]
    heads = (ROOT / "heads/README.md").read_text()
    assert all(engine in heads for engine in ENGINES) and VLLM.removesuffix(".0") in FIRST.read_text()
    for kind in (kind for kind, head in HEADS.items() if head.format.readers):
        old, vllm, sglang = (engine_words(kind, engine) for engine in (OLD_VLLM, *ENGINES))
        words = vllm or old
        cell = rf'`{{"method": "{json.loads(words[-1])["method"]}", .*' if words else "not loaded"
        named = sglang.index("--speculative-algorithm") if sglang else 0
        algorithm = f"`{' '.join(sglang[named : named + 2])}`" if sglang else "not loaded"
        row = rf"^\| {TITLES[kind]} \| {cell} \| {algorithm} \|$"
        assert re.search(row, heads, re.MULTILINE), kind


def test_the_table_of_targets_is_that_of_the_loader_contract() -> None:
    page = (ROOT / "heads/README.md").read_text()
    of_vllm = {name for name in VLLM_TARGETS if not SCALED.match(name)}
    engines = [VLLM_TARGETS, of_vllm, SGLANG_TARGETS, SGLANG_BLOCK_TARGETS]
    rows = re.findall(r"^\| ([^|]+)" + r" \| (yes|no)[^|]*" * 4 + r"\|$", page, re.MULTILINE)
    assert len(rows) > 3
    for names, *words in rows:
        for name in names.split(", "):
            plain = re.sub(r"\W", "", name).lower().replace("glm45", "glm4moe")
            for said, targets in zip(words, engines, strict=True):
                known = {target.lower().replace("_", "") for target in targets}
                assert (f"{plain}forcausallm" in known) == (said == "yes"), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link, section in re.findall(r"\]\(([^)#:]*)(?:#([^)]+))?\)", text):
        linked = page.parent / link if link else page
        assert linked.exists(), f"{link} is linked and not there"
        if section:
            titles = re.findall(r"^#+ (.+)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
            assert section in slugs, f"{link} has no section {section}"
    for name in re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]+)`", text):
        assert (ROOT / name).exists(), f"{name} is named and not there"


def test_every_file_that_code_names_exists() -> None:
    for path in [path for folder in ("heads", "eval", "train", "scripts") for path in (ROOT / folder).rglob("*.py")]:
        for name in re.findall(rf"(?<![\w/])((?:{'|'.join(FOLDERS)})/[a-z\d_/-]+\.(?:py|json|md))", path.read_text()):
            assert (ROOT / name).exists(), f"{path.relative_to(ROOT)} names {name}, which is not there"


def test_every_recipe_is_listed() -> None:
    table = [line for line in (ROOT / "recipes/README.md").read_text().splitlines() if line.startswith("| ")]
    listed = re.findall(r"`([\w.-]+\.yaml)`", "\n".join(table))
    assert sorted(listed) == sorted(path.name for path in (ROOT / "recipes").glob("*.yaml"))


def test_every_key_of_a_sweep_is_listed() -> None:
    section = (ROOT / "recipes/README.md").read_text().partition("## Keys of a sweep")[2]
    named = {name for line in section.splitlines() for name in re.findall(r"`(\w+)`", line.split(" | ")[0])}
    assert named >= Sweep.model_fields.keys()


def test_what_is_generated_of_the_pages_is_up_to_date() -> None:
    for page, text in generated().items():
        assert page.read_text(encoding="utf-8") == text, f"{page.relative_to(ROOT)}: run python scripts/write_pages.py"
    assert draw_rooms.PICTURE.read_text(encoding="utf-8") == draw_rooms.picture(), "run scripts/write_pages.py"
    (width,) = re.findall(r'viewBox="0 0 (\d+) ', draw_rooms.picture().splitlines()[0])
    boxes = re.findall(r'<rect x="(\d+)" y="\d+" width="(\d+)"', draw_rooms.picture())
    assert boxes and all(int(x) + int(wide) < int(width) for x, wide in boxes), "a room beyond the edge"
    assert escape(curve_chart(CURVES).note) in PICTURE.read_text(encoding="utf-8")


def test_a_page_shows_every_record() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "eval/results").glob("*.md"))
    named = {path for _, _, pattern in MARK.findall(text) for path in RESULTS.glob(pattern)}
    named |= {RESULTS / name for name in re.findall(r"`([\w/.-]+\.json)`", text)}
    assert named == {*RESULTS.rglob("*.json")}


def test_the_record_of_a_whole_engine_has_every_kind_that_is_said_to_be_tried() -> None:
    rows = json.loads((RESULTS / "vllm.json").read_text())["rows"]
    assert {found["head"]["kind"] for found in rows} == {kind for kind, head in HEADS.items() if head.format.tried}


def test_pages_are_short() -> None:
    texts = {page: page.read_text(encoding="utf-8") for page in USED}
    assert sum(len(MARKED.sub("", text).split()) for text in texts.values()) <= 13_500
    text = texts[FIRST]
    assert len(text.split()) <= 750
    assert len(text.splitlines()) <= 100 and len(text.partition("```bash")[0].split()) <= 220
    prose = re.sub(r"```.*?```", "", MARKED.sub("", text), flags=re.DOTALL)
    assert max(len(sentence.split()) for sentence in re.split(r"[.:;!?]\s|\n\n|^\* ", prose, flags=re.MULTILINE)) <= 30
    for page in USED[1:]:
        text = texts[page]
        assert sum(not line.startswith("|") for line in text.splitlines()) <= 210, page
        assert re.match(r"# .+\n\nFor: .+; you need: .+; takes: .+\n", text), page
