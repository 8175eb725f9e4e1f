"""The engine of a comparison: a server that is started here or runs somewhere, or a program that runs to its end."""

import argparse
import json
import shlex
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from eval.core.progress import Progress
from eval.data.prompts import Prompt
from eval.records.measure_settings import BenchSettings
from eval.runtime.sampling_params import Sampling
from eval.servers.engine_client import DRAFTED, DRAFTS, SECONDS, EngineServer, chat_body
from eval.servers.engine_process import need_python, run_inside, run_job, running
from eval.servers.gguf_conversion import convert, spec_type
from eval.servers.parity_counts import Asked, EngineAnswer, Step
from heads.core.contract import Drafter
from heads.core.engines import READERS
from heads.core.errors import UserError
from heads.core.serve_commands import OPENVINO_FOLDER, Setting
from heads.published import is_published
from heads.registry import HEADS, kind_of
from heads.saved import find_head
from heads.targets.frozen_target import FrozenTarget
from heads.targets.hub import local_folder

LIKELIEST = 5
"""Tokens whose log-probabilities are asked for."""
Run = Callable[[Coroutine[object, object, Any]], Any]
"""Runs a coroutine in the event loop of the clients."""


@contextmanager
def asked(
    options: argparse.Namespace,
    settings: BenchSettings,
    target: FrozenTarget,
    head: Drafter,
    depth: int,
    prompts: Sequence[Prompt],
    run: Run,
) -> Iterator[Asked]:
    """Ask an engine all prompts, and keep it for the questions of the ladder."""
    job: dict[str, Any] = {
        "target": local_folder(target.name),
        "head": local_folder(options.head) if is_published(options.head) else str(find_head(options.head)),
        "depth": depth,
        "threads": torch.get_num_threads(),
        "prompts": [list(prompt.ids) for prompt in prompts],
        "new_tokens": settings.max_new_tokens,
        "ends": list(target.eos_token_ids),
    }
    longest = max(map(len, job["prompts"])) + job["new_tokens"]
    job["context"] = min(max(256, longest + depth + 8), target.context_length)
    with tempfile.TemporaryDirectory(prefix="draftsmith-") as folder:
        made = Path(folder)
        if options.server:
            with open_server(options.server, run) as server:
                yield ask_server(server, Asked(server.name), options, target, prompts, settings, run)
        elif options.engine == "llama.cpp":
            with llama_server(options, kind_of(head), job, made) as (url, facts), open_server(url, run) as server:
                yield ask_server(server, Asked(READERS["llama.cpp"], facts), options, target, prompts, settings, run)
        else:
            with Progress(f"running {READERS[options.engine]}", announced=True):
                yield ask_program(options, target, head, job, made)


# Servers


@contextmanager
def llama_server(
    options: argparse.Namespace, kind: str, job: dict[str, Any], made: Path
) -> Iterator[tuple[str, dict[str, str]]]:
    """Start llama.cpp's server with target and head, and give its address, with facts about it."""
    python = need_python("llama.cpp")
    facts = {"cache": options.engine_cache}
    target = options.engine_target or str(made / "target.gguf")
    head = options.engine_head or str(made / "head.gguf")
    with Progress("converting for llama.cpp", announced=True):
        if not options.engine_target and not convert(job["target"], Path(target), log=made / "log"):
            facts["tokenizer"] = "unknown to the converter: ids are sent"
        if not options.engine_head:
            whole = None if kind == "draft" else job["target"]
            convert(job["head"], Path(head), target=whole, log=made / "log")
    files = {"target": target, "head": head}
    given = {**job, **files, "method": spec_type(kind), "cache": options.engine_cache}
    what = "llama.cpp refuses the files"
    with running(python, "llamacpp_server.py", given, what=what, folder=made) as url:
        yield url, facts


@contextmanager
def open_server(url: str, run: Run) -> Iterator[EngineServer]:
    server: EngineServer = run(EngineServer.open(url))
    try:
        yield server
    finally:
        run(server.client.aclose())


def ask_server(
    server: EngineServer,
    engine: Asked,
    options: argparse.Namespace,
    target: FrozenTarget,
    prompts: Sequence[Prompt],
    settings: BenchSettings,
    run: Run,
) -> Asked:
    """Ask a server. UserError if it is another engine, runs another model or makes no drafts."""
    if server.engine.lower() != options.engine:
        raise server.error(f"expected {options.engine}, this is {server.engine}; name its own --engine")
    server.need_draft()
    for name, theirs, ours in (
        ("a vocabulary", server.properties.get("n_vocab"), target.vocab_size),
        ("a width", server.properties.get("n_embd"), target.hidden_size),
    ):
        if theirs is not None and theirs != ours:
            raise server.error(f"serves a model with {name} of {theirs}, {target.name} has {ours}; serve the target")
    longest = max(len(prompt.ids) for prompt in prompts) + settings.max_new_tokens
    if longest > server.context_length:
        raise server.error(f"its context is {server.context_length}, {longest} are needed; start it with a longer one")
    engine.depth = server.depth
    if server.engine == "llama.cpp":
        engine.facts["weights"] = str(server.properties.get("model_ftype") or server.properties.get("ftype") or "")
        engine.weights = Path(server.root)
        engine.steps = lambda prompt, text: run(plain_steps(server, prompt, text, target.eos_token_ids))
    else:
        run(server.check_target(target, prompts[0]))
    if "tokenizer" not in engine.facts:
        engine.ids_of = lambda prompt: run(ids_of(server, prompt))
    counters = run(server.counters())
    with Progress(f"asking {engine.engine}: answer", len(prompts)) as progress:
        for prompt in prompts:
            found = run(server.ask(prompt, Sampling(), settings.max_new_tokens, target.eos_token_ids))
            before = counters
            counters = run(server.counters_after(before, [found]))
            rounds = counters[DRAFTS] - before[DRAFTS]
            drafted = counters[DRAFTED] - before[DRAFTED]
            by_position = [counters[str(k)] - before[str(k)] for k in range(server.depth)]
            ended = len(found.tokens) == found.count - 1
            engine.answers.append(EngineAnswer(found.tokens, rounds, drafted, sum(by_position), by_position, ended))
            progress.advance()
    return engine


async def plain_steps(server: EngineServer, ids: Sequence[int], text: Sequence[int], ends: Sequence[int]) -> list[Step]:
    """Return what the target of a llama-server makes of a text before each of its tokens. A request of one new token is
    never drafted for. The server gives no probabilities where it chooses one of the `ends`, which it does not return
    either, or part of a character."""
    steps = []
    greedy = {"n_predict": 1, "temperature": 0.0, "samplers": ["temperature"], "return_tokens": True}
    for n in range(len(text)):
        body = {**greedy, "prompt": [*ids, *text[:n]], "n_probs": LIKELIEST, "cache_prompt": True}
        reply = await server.client.send("/completion", body, SECONDS)
        end = text[n] if text[n] in ends else ends[0]
        found = reply.get("completion_probabilities") or [{"top_logprobs": []}]
        likeliest = {token["id"]: token["logprob"] for token in found[0]["top_logprobs"]}
        steps.append(Step(reply["tokens"][0] if reply.get("tokens") else end, likeliest))
    return steps


async def ids_of(server: EngineServer, prompt: Prompt) -> list[int]:
    """Return the token ids that a server makes of a prompt: of a chat by its own template."""
    send = partial(server.client.send, "/tokenize")
    if server.engine == "vLLM":
        reply = await send(chat_body(prompt) if prompt.messages else {"prompt": prompt.text})
        return [int(token) for token in reply["tokens"]]
    text = prompt.text
    if prompt.messages:
        text = (await server.client.send("/apply-template", chat_body(prompt)))["prompt"]
    reply = await send({"content": text, "add_special": True, "parse_special": True})
    return [int(token) for token in reply["tokens"]]


# Programs


def ask_program(
    options: argparse.Namespace, target: FrozenTarget, head: Drafter, job: dict[str, Any], made: Path
) -> Asked:
    """Run an engine that has no server here, with the head and without. vLLM and OpenVINO get what the printed command
    says."""
    python = need_python(options.engine)
    name = READERS[options.engine]
    answer = partial(run_job, python, f"{options.engine}_answers.py", what=f"{name} fails", folder=made)
    own: Any = head
    setting = Setting(target=job["target"], head=job["head"], steps=job["depth"])
    make = HEADS[kind_of(head)].format.readers.get(name)
    if make is None:
        raise UserError(f"{options.head}: {name} has no method for heads of kind {kind_of(head)}")
    command = make(setting, {"draftsmith": {"config": own.config.model_dump()}})
    if options.engine == "vllm":
        job |= {"rows": 1, "options": {"trust_remote_code": True} if target.trust_remote_code else {}}
        found = answer({**job, "speculative": json.loads(shlex.split(command)[-1])})
        plain = answer({**job, "speculative": None})
        engine = Asked(" ".join(f"{name} {version}" for name, version in found["versions"].items() if "vllm" in name))
        engine.plain = plain["tokens"]
        for tokens, rounds in zip(found["tokens"], found["accepted"], strict=True):
            by_position = [sum(count > k for count in rounds) for k in range(job["depth"])]
            drafted = len(rounds) * job["depth"]
            engine.answers.append(EngineAnswer(tokens, len(rounds), drafted, sum(by_position), by_position))
        return engine
    if options.engine == "openvino":
        job |= export_openvino(options, python, command, made)
    found = answer(job)
    engine = Asked(found["version"])
    engine.answers = [EngineAnswer(**each) for each in found["answers"]]
    engine.plain = [each["tokens"] for each in answer({**job, "head": None})["answers"]]
    return engine


def export_openvino(options: argparse.Namespace, python: Path, command: str, made: Path) -> dict[str, str]:
    """Run the printed commands, but for a part that is given, and return the folders of target and head."""
    exported = {"target": options.engine_target, "head": options.engine_head}
    for line in command.splitlines():
        program, *words = shlex.split(line)
        part = "head" if f"head{OPENVINO_FOLDER}" in words else "target"
        if exported[part] is None:
            words = [str(made / word) if word.endswith(OPENVINO_FOLDER) else word for word in words]
            if program == "python":
                words[0] = Path(words[0]).name
            else:
                words[:0] = ["-m", "optimum.commands.optimum_cli"]
            run_inside(python, *words, what=f"{line}: OpenVINO refuses it", log=made / "log")
    return {part: folder or str(made / f"{part}{OPENVINO_FOLDER}") for part, folder in exported.items()}
