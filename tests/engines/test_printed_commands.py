"""The command that a measurement prints, typed into a whole engine, serves what was measured: the printed tau is found
there."""

import json
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from eval import bench, parity
from eval.pages.verdicts import serve_command
from eval.records.results import read_results
from eval.records.schema import Results
from eval.servers.engine_process import INSIDE
from eval.servers.gguf_conversion import converter_of
from heads.saved import save_head, target_record
from heads.targets.load import load_target
from tests.engines.engine_record import DRAFT, EAGLE3, SMALL, VARIABLE, add_row, need, new_head
from tests.engines.vllm_process import TARGET, free_port, serving, vllm_server
from tests.support.annotations import Once

pytestmark = pytest.mark.engine
HEADS: dict[str, dict[str, Any]] = {"eagle3": EAGLE3, "dflash": SMALL | {"block_size": 5}, "draft": DRAFT}
PROMPTS = ["--prompts", "python-heldout", "--num-prompts", "4", "--max-prompt-tokens", "128", "--max-new-tokens", "48"]
HERE = ["--no-timing", "--tree", "chain:4"]


@contextmanager
def typed(command: str, folder: Path) -> Iterator[str]:
    """Run a printed command, with float32 and a port, for a `with` block, and give the address of its server."""
    *before, server = [shlex.split(line) for line in command.splitlines() if not line.startswith("#")]
    if server[:2] == ["vllm", "serve"]:
        with vllm_server(folder, *server[3:], target=server[2]) as url:
            yield url
        return
    python = need("llama.cpp")
    assert len(before) == 2
    # The converter does not know the quickstart's tokenizer.
    converter = [str(python), str(INSIDE / "llamacpp_convert.py"), str(converter_of(python))]
    for interpreter, script, *rest in before:
        assert (interpreter, script) == ("python", "convert_hf_to_gguf.py")
        subprocess.run([*converter, *rest], cwd=folder, check=True, capture_output=True)
    assert server[0] == "llama-server"
    port = free_port()
    program = [str(python.parent / server[0]), *server[1:], "--port", port, "--no-warmup"]
    program += " ".join(f"{option} f32" for option in ("-ctk", "-ctv", "-ctkd", "-ctvd")).split()
    with serving([*program, "-fa", "off", "-c", "512", "-np", "1"], f"http://127.0.0.1:{port}", folder) as url:
        yield url


def make_heads(folder: Path) -> None:
    """Write new heads, once for each engine."""
    target = load_target(str(TARGET), dtype=torch.float32)
    record = target_record(target)
    for name, settings in HEADS.items():
        head = new_head(name, target, settings)
        for engine in ("vllm", "llama.cpp"):
            save_head(head, folder / engine / name, target=record, provenance={"serve": [engine]}, dtype=torch.float32)


def tau_of(results: Results) -> float:
    return results.measurements[results.chosen].tau.mean


DRAFTS = {"vllm": [*HEADS, "ngram:3"], "llama.cpp": [*HEADS, "lookup:2+eagle3"]}


@pytest.mark.parametrize(("engine", "draft"), [(engine, draft) for engine in DRAFTS for draft in DRAFTS[engine]])
def test_the_printed_command_serves_what_was_measured(engine: str, draft: str, once: Once, tmp_path: Path) -> None:
    need(engine, *["llama-server"] * (engine == "llama.cpp"))
    folder = once("printed-heads", make_heads) / engine
    lookup, plus, name = draft.rpartition("+")
    head = f"{lookup}{plus}{folder / name}" if name in HEADS else draft
    words = ["--target", str(TARGET), *PROMPTS]
    assert bench.main([head, *words, *HERE, "--out", str(tmp_path / "here")]) == 0
    here = read_results(tmp_path / "here/audit.json")
    command = serve_command(here)
    assert command is not None
    with typed(command, tmp_path) as url:
        assert bench.main([*words, "--server", url, "--out", str(tmp_path / "there")]) == 0
    there = read_results(tmp_path / "there/results.json")
    assert there.server is not None
    shown = command.replace(f"{folder}/", "").replace(f"{TARGET}", "quickstart")
    row = {
        **{"draft": draft, "engine": there.server.name, "command": shown},
        **{"tau_here": tau_of(here), "tau_there": tau_of(there)},
        **{"texts_equal": there.exact.identical, "texts": there.exact.prompts},
    }
    facts = {"target": {**here.target.model_dump(), "name": "quickstart"}, "options": [*HERE, *PROMPTS]}
    how = f"{VARIABLE}=FOLDER pytest -m engine tests/engines/test_printed_commands.py"
    add_row("printed", row, {**facts, "command": how})
    assert there.exact.identical == there.exact.prompts == 4
    # An answer's last round is cut here, in llama.cpp its draft is shorter; llama.cpp's lookup follows other matches.
    allowed = 0.15 if plus else 0.02
    assert tau_of(there) == pytest.approx(tau_of(here), rel=allowed) and tau_of(there) > 1.02


def test_the_bound_at_which_a_server_ends_drafts_is_named(once: Once, tmp_path: Path) -> None:
    need("llama.cpp", "llama-server")
    words = [str(once("printed-heads", make_heads) / "llama.cpp/eagle3"), "--target", str(TARGET), *PROMPTS]
    assert bench.main([*words, *HERE, "--out", str(tmp_path / "here")]) == 0
    command = serve_command(read_results(tmp_path / "here/audit.json"))
    assert command is not None
    with typed(command.replace("llama-server ", "llama-server --spec-draft-p-min 0.3 "), tmp_path) as url:
        status = parity.main([*words, "--engine", "llama.cpp", "--server", url, "--out", str(tmp_path / "there")])
    answer = json.loads((tmp_path / "there/parity.json").read_text())["answer"]
    assert status == 1 and "its drafts end before a token less likely than about 0.3 (--spec-draft-p-min)" in answer
