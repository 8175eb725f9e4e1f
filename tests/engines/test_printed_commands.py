"""The command that a measurement prints, typed into a whole engine, serves what was measured: the printed tau is found
there."""

import json
import shlex
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from eval import bench, parity
from eval.pages.verdicts import serve_command
from eval.records.results import read_results
from eval.records.schema import Results
from eval.servers.engine_process import INSIDE, engine_python
from eval.servers.gguf_conversion import converter_of
from heads.registry import build_head
from heads.saved import save_head, target_record
from heads.targets.load import load_target
from tests.engines.engine_record import VARIABLE, add_row
from tests.engines.vllm_process import TARGET, serving, vllm_server

pytestmark = pytest.mark.engine
SMALL: dict[str, Any] = {"num_layers": 2, "intermediate_size": 192}
HEADS: dict[str, dict[str, Any]] = {
    "eagle3": {"draft_vocab_size": 2048, "intermediate_size": 384},
    "dflash": SMALL | {"block_size": 5},
    "draft": {"layers": [0, 5, 10, 15, 19]},
}
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
    python = engine_python("llama.cpp")
    assert python is not None and len(before) == 2
    # The converter does not know the quickstart's tokenizer.
    converter = [str(python), str(INSIDE / "llamacpp_convert.py"), str(converter_of(python))]
    for interpreter, script, *rest in before:
        assert (interpreter, script) == ("python", "convert_hf_to_gguf.py")
        subprocess.run([*converter, *rest], cwd=folder, check=True, capture_output=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert server[0] == "llama-server"
    program = [str(python.parent / server[0]), *server[1:], "--port", str(port), "--no-warmup"]
    for option in ("-ctk", "-ctv", "-ctkd", "-ctvd"):
        program += [option, "f32"]
    with serving([*program, "-fa", "off", "-c", "512", "-np", "1"], f"http://127.0.0.1:{port}", folder) as url:
        yield url


def make_heads(folder: Path) -> None:
    """Write new heads, whose initial weights draft a few right tokens, once for each engine."""
    target = load_target(str(TARGET), dtype=torch.float32)
    for name, settings in HEADS.items():
        with torch.random.fork_rng():
            torch.manual_seed(0)
            head = build_head(name, settings, target, torch.ones(target.vocab_size))
        for engine in ("vllm", "llama.cpp"):
            record = target_record(target)
            save_head(head, folder / engine / name, target=record, provenance={"serve": [engine]}, dtype=torch.float32)


def tau_of(results: Results) -> float:
    return results.measurements[results.chosen].tau.mean


@pytest.mark.parametrize(
    ("engine", "draft"),
    [
        *(("vllm", draft) for draft in (*HEADS, "ngram:3")),
        *(("llama.cpp", draft) for draft in (*HEADS, "lookup:2+eagle3")),
    ],
)
def test_the_printed_command_serves_what_was_measured(
    engine: str, draft: str, once: Callable[[str, Callable[[Path], None]], Path], tmp_path: Path
) -> None:
    python = engine_python(engine)
    if python is None or (engine == "llama.cpp" and not (python.parent / "llama-server").exists()):
        pytest.skip(f"no environment with {engine} and its server (scripts/make_engine.sh {engine})")
    folder = once("printed-heads", make_heads) / engine
    lookup, plus, name = draft.rpartition("+")
    head = f"{lookup}{plus}{folder / name}" if name in HEADS else draft
    words = ["--target", str(TARGET), *PROMPTS]
    assert bench.main([head, *words, *HERE, "--out", str(tmp_path / "here")]) == 0
    here = read_results(tmp_path / "here/audit.json")
    command = serve_command(here)
    assert command is not None
    with typed(command, tmp_path) as url:
        own = (
            [*words, "--server", url]
            if name in HEADS and not plus
            else ["--target", str(TARGET), *PROMPTS, "--server", url]
        )
        assert bench.main([*own, "--out", str(tmp_path / "there")]) == 0
    there = read_results(tmp_path / "there/results.json")
    assert there.server is not None
    shown = command.replace(f"{folder}/", "").replace(f"{TARGET}", "quickstart")
    row = {
        "draft": draft,
        "engine": there.server.name,
        "command": shown,
        "tau_here": tau_of(here),
        "tau_there": tau_of(there),
        "texts_equal": there.exact.identical,
        "texts": there.exact.prompts,
    }
    facts = {"target": {**here.target.model_dump(), "name": "quickstart"}, "options": [*HERE, *PROMPTS]}
    how = f"{VARIABLE}=FOLDER pytest -m engine tests/engines/test_printed_commands.py"
    add_row("printed", row, {**facts, "command": how})
    assert there.exact.identical == there.exact.prompts == 4
    # An answer's last round is cut here, in llama.cpp its draft is shorter; llama.cpp's lookup follows other matches.
    allowed = 0.15 if plus else 0.02
    assert tau_of(there) == pytest.approx(tau_of(here), rel=allowed) and tau_of(there) > 1.02


def test_the_bound_at_which_a_server_ends_drafts_is_named(
    once: Callable[[str, Callable[[Path], None]], Path], tmp_path: Path
) -> None:
    python = engine_python("llama.cpp")
    if python is None or not (python.parent / "llama-server").exists():
        pytest.skip("no environment with llama.cpp and its server (scripts/make_engine.sh llama.cpp)")
    words = [str(once("printed-heads", make_heads) / "llama.cpp/eagle3"), "--target", str(TARGET), *PROMPTS]
    assert bench.main([*words, *HERE, "--out", str(tmp_path / "here")]) == 0
    command = serve_command(read_results(tmp_path / "here/audit.json"))
    assert command is not None
    with typed(command.replace("llama-server ", "llama-server --spec-draft-p-min 0.3 "), tmp_path) as url:
        status = parity.main([*words, "--engine", "llama.cpp", "--server", url, "--out", str(tmp_path / "there")])
    answer = json.loads((tmp_path / "there/parity.json").read_text())["answer"]
    assert status == 1 and "its drafts end before a token less likely than about 0.3 (--spec-draft-p-min)" in answer
