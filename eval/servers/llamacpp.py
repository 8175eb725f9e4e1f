"""llama.cpp: conversion of targets and heads into GGUF files, and a client of its server.

Read by build 11549's names (xllamacpp 2026.10.11549) and the converter of build 11434: `/completion`, `/props`,
`/metrics`. A request of one new token is never drafted for, so it shows what the server's target alone would choose.
"""

import asyncio
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.data.prompts import Prompt
from eval.servers.engine_process import EngineAnswer, need_python, run_inside
from eval.servers.openai_client import ServerClient
from heads.core.errors import UserError

COUNTER = re.compile(r"^llamacpp:spec_decode_num_(\w+?)_total(?:\{position=\"(\d+)\"\})? (\S+)$", re.MULTILINE)
METHODS = {"eagle3": "eagle3", "dflash": "dflash", "dflash2": "dflash", "dspark": "dspark", "draft": "simple"}
"""Name of a kind's method in --spec-type, after `draft-`."""
LIKELIEST = 5
"""Tokens whose log-probabilities are asked for."""
SECONDS = 600.0


@dataclass(frozen=True)
class Step:
    """What a server's target, without a draft, makes of a text so far."""

    choice: int
    log_probabilities: dict[int, float]
    """Of the likeliest tokens."""


def converter_of(python: Path) -> Path:
    """Return the path of the converter, which is part of llama.cpp's sources."""
    note = python.parents[1] / "converter"
    script = Path(note.read_text().strip()) if note.is_file() else None
    if script is None or not script.is_file():
        raise UserError(f"{note}: names no converter of llama.cpp; run scripts/make_engine.sh llama.cpp again")
    return script


def convert(folder: str, file: Path, *, target: str | None = None, dtype: str = "f32", log: Path) -> bool:
    """Write a target's folder, or that of a head of `target`, as a GGUF file. Return False if llama.cpp does not know
    the tokenizer: the file then serves token ids only. UserError, with the converter's words, if it refuses."""
    python = need_python("llama.cpp")
    options = [folder, "--outtype", dtype, "--outfile", str(file)]
    options += ["--target-model-dir", target] if target else []
    said = run_inside(
        python,
        "llamacpp_convert.py",
        str(converter_of(python)),
        *options,
        what=f"{folder}: llama.cpp's converter refuses it",
        log=log,
    )
    return "unknown tokenizer" not in said


class LlamaServer:
    """A client of one server, asked one request at a time."""

    def __init__(self, url: str, runner: asyncio.Runner) -> None:
        self.client = ServerClient(url, retries=0)
        self._runner = runner
        cards = self._runner.run(self.client.models())
        if not cards or cards[0].get("owned_by") != "llamacpp":
            owner = cards[0].get("owned_by") if cards else "nobody"
            raise self.client.error(f"expected llama.cpp's server, this one is by {owner}; name its own --engine")
        self.meta: dict[str, Any] = cards[0].get("meta") or {}
        self.props: dict[str, Any] = self.send("/props")
        self.context = int(self.props["default_generation_settings"]["n_ctx"])
        self.ftype = str(self.props.get("model_ftype") or self.meta.get("ftype") or "")

    def send(self, path: str, body: Any = None, reply: type = object) -> Any:
        return self._runner.run(self.client.send(path, body, SECONDS, reply=reply))

    def close(self) -> None:
        self._runner.run(self.client.aclose())

    def error(self, what: str) -> UserError:
        return self.client.error(what)

    def counters(self) -> tuple[int, int, int, list[int]]:
        """Return the server's rounds, draft tokens and accepted ones, and these by position."""
        totals: dict[str, int] = {}
        positions: dict[int, int] = {}
        for name, position, value in COUNTER.findall(self.send("/metrics", reply=str)):
            if position:
                positions[int(position)] = int(float(value))
            else:
                totals[name] = int(float(value))
        if "drafts" not in totals:
            raise self.error("/metrics has no counters of drafts; start a newer llama-server with --metrics")
        by_position = [positions[n] for n in sorted(positions)]
        return totals["drafts"], totals["draft_tokens"], totals["accepted_tokens"], by_position

    def complete(self, ids: Sequence[int], new_tokens: int, **options: Any) -> dict[str, Any]:
        body = {
            "prompt": list(ids),
            "n_predict": new_tokens,
            "temperature": 0.0,
            "samplers": ["temperature"],
            "repeat_penalty": 1.0,
            "return_tokens": True,
            **options,
        }
        reply: dict[str, Any] = self.send("/completion", body)
        return reply

    def answer(self, ids: Sequence[int], new_tokens: int) -> EngineAnswer:
        """Return a greedy answer with the server's counts of it."""
        before = self.counters()
        reply = self.complete(ids, new_tokens, cache_prompt=False)
        after = self.counters()
        by_position = [now - then for now, then in zip(after[3], [*before[3], *[0] * len(after[3])], strict=False)]
        rounds, drafted, accepted = (now - then for now, then in zip(after[:3], before[:3], strict=True))
        said = reply.get("timings", {}).get("draft_n", 0)
        if said != drafted:
            raise self.error(
                f"counts {drafted} draft tokens in a request that had {said}; measure it while it has no other requests"
            )
        return EngineAnswer(reply["tokens"], rounds, drafted, accepted, by_position, reply.get("stop_type") == "eos")

    def plain_steps(self, ids: Sequence[int], text: Sequence[int]) -> list[Step]:
        """Return what the target alone makes of a text before each of its tokens."""
        steps = []
        for n in range(len(text)):
            reply = self.complete([*ids, *text[:n]], 1, n_probs=LIKELIEST, cache_prompt=True)
            (found,) = reply["completion_probabilities"][:1]
            likeliest = {token["id"]: token["logprob"] for token in found["top_logprobs"]}
            steps.append(Step(found["id"], likeliest))
        return steps

    def ids_of(self, prompt: Prompt) -> list[int]:
        """Return the token ids that the server makes of a prompt: of a chat by its own template."""
        text = prompt.text
        if prompt.messages:
            body = {"messages": list(prompt.messages), "chat_template_kwargs": dict(prompt.arguments)}
            text = self.send("/apply-template", body)["prompt"]
        reply = self.send("/tokenize", {"content": text, "add_special": True, "parse_special": True})
        return [int(token) for token in reply["tokens"]]


def check_gguf(file: Path, head: Any, kind: str) -> None:
    """Raise UserError unless a GGUF file holds a head: its layers of the target, its options, and every value."""
    found = metadata(file)
    tensors = found.pop("tensors")
    config = head.config
    named = {"block_size": "block_size", "causal": "attention.causal", "selector_top_k": "selector_top_k"}
    named |= {name: name for name in ("norm_before_fc", "norm_before_residual", "selector_rank", "conv_kernel_size")}
    prefix = "eagle3" if kind == "eagle3" else "dflash"
    expected = {f"{prefix}.{name}": getattr(config, ours) for ours, name in named.items() if hasattr(config, ours)}
    expected[f"{prefix}.target_layers"] = list(head.aux_layer_ids)
    for name, value in expected.items() if kind != "draft" else ():
        if found.get(name) != value:
            raise UserError(f"{file.name}: {name}: the converter wrote {found.get(name)}, the head has {value}")
    ours = sum(value.numel() for name, value in head.to_checkpoint().items() if name != "t2d")
    theirs = sum(math.prod(shape) for name, shape in tensors.items() if not name.startswith("rope_"))
    if ours != theirs:
        raise UserError(
            f"{file.name}: the converter wrote {theirs:,} of the head's {ours:,} values; serve it elsewhere"
        )


def metadata(file: Path) -> dict[str, Any]:
    """Return a GGUF file's metadata, and under `tensors` the shape of each tensor as torch has it."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise UserError("a GGUF file is read back with gguf; pip install gguf") from None
    reader = GGUFReader(file)
    found: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
    found["tensors"] = {tensor.name: tuple(int(n) for n in reversed(tensor.shape)) for tensor in reader.tensors}
    return found
