"""The arguments of a chat template: a head is measured on prompts that are rendered as its training data were."""

import json
import re
import shutil
from functools import partial
from pathlib import Path

import pytest

from eval import bench, chat
from eval.core.command_line import exit_status, template_arguments
from heads.targets.target_files import load_tokenizer
from tests.conftest import CHAT_TEMPLATE
from tests.support.chats import talk, write_chats
from tests.support.runs import Settings, measured_run, the_error, write_recipe
from train.entry import attempt
from train.run.open_run import read_recipe

CALM = "{% if calm %}so {% endif %}"


@pytest.fixture
def target(tiny_target_dir: Path, tmp_path: Path) -> Path:
    """The tiny target, whose template begins a calm conversation with a word."""
    folder = tmp_path / "target"
    shutil.copytree(tiny_target_dir, folder)
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = CALM + CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def test_a_head_is_measured_with_the_arguments_that_it_was_trained_with(
    target: Path, settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chats = write_chats(tmp_path / "chats.jsonl", [{"messages": talk("the sea", "ten so the sea is near")}] * 8)
    settings["target"]["path"] = str(target)
    settings["data"] |= {"sources": [chats], "template": {"calm": True}}
    settings["train"]["max_steps"] = 2
    run, own = measured_run("medusa", settings)
    assert own["target"]["template"] == {"calm": True}

    def measured(*options: str, head: str = str(run)) -> tuple[str, object]:
        out = tmp_path / f"out{len([*tmp_path.iterdir()])}"
        words = [head, "--prompts", settings["eval"]["prompts"], "--max-new-tokens", "8", "--tree", "chain:2"]
        assert exit_status(lambda: bench.main([*words, "--no-timing", "--out", str(out), *options])) == 0
        results = json.loads((out / "audit.json").read_text())
        return results["settings"]["prompts_hash"], results["target"]["template"]

    as_trained = own["settings"]["prompts_hash"], {"calm": True}
    assert measured() == measured("--template", "calm=true") == as_trained
    assert not re.search("trained with|left at default", capsys.readouterr().err)
    without, arguments = measured("--template", "", "--seed", "1")
    assert f"{run}: was trained with template arguments {{'calm': True}}, and is given {{}}" in capsys.readouterr().err
    assert without != own["settings"]["prompts_hash"] and arguments == {}
    for given in ([], ["--template", "calm=false"]):
        measured("--target", str(target), *given, head="lookup:2")
        line = f"{target}: the chat template reads calm (false), left at default; a head trained with another value"
        assert (line in capsys.readouterr().err) == (not given)
    for wrong, fault in (("clam=true", "has no argument 'clam'; it has calm"), ("calm", "expected NAME=VALUE")):
        assert exit_status(partial(chat.main, [str(run), "--prompt", "so", "--template", wrong])) == 2
        error = the_error(capsys)
        assert error.startswith("error: --template: ") and fault in error


def test_arguments_as_they_are_typed() -> None:
    read = template_arguments("thinking=false,effort=low,budget=12,share=0.5,none=null,nan=NaN,text=a=b")
    expected = {"thinking": False, "effort": "low", "budget": 12, "share": 0.5, "none": "null", "nan": "NaN"}
    assert read == {**expected, "text": "a=b"} and template_arguments("") == {}


def test_an_argument_that_the_template_does_not_read(
    target: Path, settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A recipe's is left out, the command line's is an error, and both are said before weights are loaded."""
    (target / "model.safetensors").unlink()
    settings["target"]["path"] = str(target)
    chats = write_chats(tmp_path / "x.jsonl", [{"messages": talk("the sea", "so")}])
    settings["data"] |= {"sources": [chats], "template": {"thinks": False, "calm": True}}
    recipe = str(write_recipe(settings))
    assert read_recipe([recipe]).data.template == {"calm": True}
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"data.template: left out thinks, which the chat template of {target} does not read"
    for given in ("data.template.clam=true", "--data.template={clam: true}"):
        for plan in ([], ["--plan"]):
            assert attempt("medusa", [recipe, given, *plan]) == 2
            error = the_error(capsys)
            assert error.endswith("clam: the chat template reads no such argument; did you mean 'calm'?; leave it out")
    assert attempt("medusa", [recipe, "--plan"]) == 0 and "left out thinks" in capsys.readouterr().err
    assert read_recipe([recipe, "data.template={}"]).data.template == {}
    own = tmp_path / "own.jinja"
    own.write_text("{% if thinks %}{% endif %}" + CHAT_TEMPLATE)
    settings["data"]["sources"].append({"kind": "chat", "path": "y.jsonl", "chat_template": str(own)})
    assert read_recipe([str(write_recipe(settings))]).data.template == {"thinks": False, "calm": True}
