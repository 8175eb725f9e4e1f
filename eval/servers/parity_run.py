"""A comparison of this runtime with an engine: the engine is started or asked, the ladder is climbed, and the record
and its page are written."""

import argparse
import asyncio
import shlex
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from pydantic import BaseModel

from eval.core.progress import Progress
from eval.data.prompts import Prompt, load_prompts, split_prompts
from eval.measure.machine import machine
from eval.measure.open_models import fitting_head, open_target_of
from eval.records.measure_settings import BenchSettings
from eval.records.results import write_record
from eval.runtime.engine import Request
from eval.runtime.near_ties import FAR, find_mismatches, first_difference
from eval.runtime.sampling_params import Sampling
from eval.servers.engine_client import DRAFTED, DRAFTS, EngineServer
from eval.servers.engine_process import EngineAnswer, need_python, run_inside, run_job, running
from eval.servers.llamacpp import METHODS, LlamaServer, Step, convert
from eval.servers.parity_ladder import (
    Ladder,
    Precision,
    Run,
    count_distance,
    distance_of,
    likeliest_gap,
    precisions,
    same_text,
    tau,
)
from heads.core.contract import Drafter
from heads.core.engines import READERS
from heads.core.errors import UserError, first_line
from heads.core.files import write_text
from heads.published import is_published
from heads.registry import kind_of
from heads.saved import check_loaders, find_head, read_config, trained_depth
from heads.targets.frozen_target import FrozenTarget
from heads.targets.hub import is_here, repo_and_revision
from heads.targets.load import load_target

DEPTH = 5
"""Draft tokens in a round, where neither the command, the server nor the training says."""
CHECKED = 16
"""Tokens that show whether a server runs the target."""
ROUNDING = 1e-4
"""Root mean square of differences of log-probabilities that two implementations in float32 have."""
HALF = 5e-3
"""The same of two implementations, one of which computes in 16 bits."""
SIXTEEN = "it computes in 16 bits, as attention does with llama-server's default KV cache (f16)"
SHARED = 0.95
"""A precision is the engine's if it leaves less than this fraction of the differences: any other would add to them."""
REPRODUCED = 0.3
"""A cause is the engine's if it leaves at most this fraction of the differences in counts."""
FOREIGN = 2.0
"""An engine whose choices are less likely than this, in nats, by the median, runs another model."""


class Compared(BaseModel):
    """One prompt, here and in the engine."""

    prompt: str
    texts_equal: bool
    first_difference: int | None
    here: dict[str, Any]
    engine: dict[str, Any]


class ParityRecord(BaseModel):
    measured_at: str
    versions: dict[str, str]
    device: dict[str, Any]
    command: list[str]
    engine: str
    facts: dict[str, str]
    head: str
    kind: str
    target: str
    depth: int
    settings: dict[str, Any]
    requests: list[Compared]
    lines: list[str]
    """What each step of the ladder found."""
    equal: bool
    answer: str


class Asked:
    """An engine that answers: its name, its answers, and what it can say without a draft."""

    def __init__(self, engine: str, facts: dict[str, str] | None = None) -> None:
        self.engine = engine
        self.facts = facts or {}
        self.answers: list[EngineAnswer] = []
        self.depth: int | None = None
        """Draft tokens in a round, if the engine says."""
        self.llama: LlamaServer | None = None
        self.plain: list[list[int]] | None = None
        """Texts without a draft."""


def compare(options: argparse.Namespace, settings: BenchSettings) -> ParityRecord:
    target, tokenizer = open_target_of(options.head, options)
    head = fitting_head(options.head, target)
    kind = kind_of(head)
    folder = None
    record = None
    if not is_published(options.head):
        folder = find_head(options.head)
        record = read_config(folder)
    trained = trained_depth(record) if record else None
    depth = int(options.tree.removeprefix("chain:")) if options.tree else min(trained or DEPTH, DEPTH)
    lines = check_folder(options, folder, head)
    room = target.context_length - settings.max_new_tokens - depth - 2
    prompts = [
        prompt
        for suite in split_prompts(settings.prompts)
        for prompt in load_prompts(
            suite,
            tokenizer,
            num_prompts=settings.num_prompts,
            max_prompt_tokens=min(settings.max_prompt_tokens or room, room),
            seed=settings.seed,
            skip_long=True,
            vocab_size=target.vocab_size,
        )
    ]
    if not prompts:
        raise UserError(f"--prompts {settings.prompts}: none has at most {settings.max_prompt_tokens} tokens")
    with (
        asyncio.Runner() as runner,
        tempfile.TemporaryDirectory(prefix="draftsmith-") as made,
        asked(options, settings, target, head, depth, prompts, Path(made), runner) as engine,
    ):
        if engine.depth and not options.tree:
            depth = engine.depth
        ids = [prompt.ids for prompt in prompts]
        ladder = Ladder(target, head, depth, options.engine, ids, settings.max_new_tokens, engine.answers, engine.depth)
        ladder.lines = lines
        own, answer = climb(ladder, engine, prompts, tokenizer.bos_token_id)
    equal = ladder.distance(own) == ladder.other_texts(own) == 0
    requests = [
        Compared(
            prompt=prompt.id,
            texts_equal=same_text(text, answer_),
            first_difference=None if same_text(text, answer_) else first_difference(text, answer_.tokens),
            here=counts_of(count),
            engine=counts_of(answer_),
        )
        for prompt, text, count, answer_ in zip(prompts, own.texts, own.counts, engine.answers, strict=True)
    ]
    facts = machine(target.device)
    command = ["python", "eval/parity.py", options.head, "--target", target.name, "--engine", options.engine]
    command += ["--server", options.server] if options.server else []
    return ParityRecord(
        measured_at=facts["measured_at"],
        versions=facts["versions"],
        device=facts["device"],
        command=[*command, "--tree", f"chain:{depth}", "--prompts", settings.prompts],
        engine=engine.engine,
        facts=engine.facts,
        head=options.head,
        kind=kind,
        target=target.name,
        depth=depth,
        settings=settings.model_dump(include={"prompts", "num_prompts", "max_prompt_tokens", "max_new_tokens", "seed"}),
        requests=requests,
        lines=ladder.lines,
        equal=equal and answer.startswith("the head"),
        answer=answer,
    )


# 1. The folder


def check_folder(options: argparse.Namespace, folder: Path | None, head: Drafter) -> list[str]:
    """Return what the engine's reader makes of a head's folder. UserError if it takes no such head."""
    if folder is None:
        return [f"folder: {line}" for line in (head.origin.differs if head.origin else ())]
    verdict = next(v for v in check_loaders(folder) if v.reader == READERS[options.engine])
    if verdict.unsupported and not (options.server or options.engine_head):
        raise UserError(f"{options.head}: {verdict.reader} {verdict.unsupported}")
    said = [verdict.unsupported] if verdict.unsupported else list(verdict.errors)
    return [f"folder: {verdict.reader}: {line}" for line in said] or [f"folder: {verdict.reader} reads it whole"]


def other_ids(prompts: Sequence[Prompt], server: LlamaServer, bos: int | None) -> str | None:
    """Return how the ids that a server makes of the prompts differ from those here, or None. Of plain text only the
    first tokens are compared: held-out prompts are cut from longer texts."""
    found = []
    for prompt in prompts:
        ids = server.ids_of(prompt)
        ours = list(prompt.ids)
        number = leading(ids, bos)
        here = leading(ours, bos)
        if number != here:
            found.append((prompt.id, f"{number} BOS at their start, {here} here"))
        elif prompt.messages and ids != ours:
            place = first_difference(ours, ids)
            found.append((prompt.id, f"others from position {place} on, {len(ids)} for {len(ours)}"))
    if not found:
        return None
    name, what = found[0]
    return f"the server makes other ids of {len(found)} of {len(prompts)} prompts: {what} ({name})"


def leading(ids: Sequence[int], token: int | None) -> int:
    """Return how many times a list begins with a token."""
    return next((n for n, each in enumerate(ids) if each != token), len(ids))


# The engines


@contextmanager
def asked(
    options: argparse.Namespace,
    settings: BenchSettings,
    target: FrozenTarget,
    head: Drafter,
    depth: int,
    prompts: Sequence[Prompt],
    made: Path,
    runner: asyncio.Runner,
) -> Iterator[Asked]:
    """Ask an engine all prompts, and keep it for the questions of the ladder."""
    job: dict[str, Any] = {
        "depth": depth,
        "threads": torch.get_num_threads(),
        "prompts": [list(prompt.ids) for prompt in prompts],
        "new_tokens": settings.max_new_tokens,
        "ends": list(target.eos_token_ids),
    }
    folder = local_folder(options.head) if is_published(options.head) else str(find_head(options.head))
    if options.engine == "llama.cpp":
        with llama_server(options, target, head, folder, job, made) as (url, notes):
            engine = Asked("llama.cpp", notes)
            server = engine.llama = LlamaServer(url, runner)
            try:
                ask_llama(engine, server, options, target, prompts, settings)
                yield engine
            finally:
                server.close()
    elif options.server:
        yield runner.run(ask_vllm_server(options.server, target, prompts, settings))
    else:
        yield ask_program(options, target, head, folder, job, made)


def local_folder(path: str) -> str:
    """Return the folder of a model that is loaded here already: as it is, or the Hub's snapshot."""
    if is_here(path):
        return path
    repo, revision = repo_and_revision(path)
    return str(snapshot_download(repo, revision=revision, local_files_only=True))


@contextmanager
def llama_server(
    options: argparse.Namespace, target: FrozenTarget, head: Drafter, folder: str, job: dict[str, Any], made: Path
) -> Iterator[tuple[str, dict[str, str]]]:
    """Give the address of llama.cpp's server with the head: the user's, or one that is started here."""
    if options.server:
        yield options.server, {}
        return
    python = need_python("llama.cpp")
    kind = kind_of(head)
    notes = {"cache": options.engine_cache}
    files: dict[str, Any] = {"target": options.engine_target, "head": options.engine_head}
    with Progress("converting for llama.cpp", announced=True):
        if files["target"] is None:
            files["target"] = str(made / "target.gguf")
            if not convert(local_folder(target.name), Path(str(files["target"])), log=made / "log"):
                notes["tokenizer"] = "unknown to the converter: ids are sent"
        if files["head"] is None:
            files["head"] = str(made / "head.gguf")
            whole = None if kind == "draft" else local_folder(target.name)
            convert(folder, Path(str(files["head"])), target=whole, log=made / "log")
    context = max(map(len, job["prompts"])) + job["new_tokens"] + job["depth"] + 8
    settings = {**job, **files, "method": METHODS[kind], "cache": options.engine_cache, "context": max(256, context)}
    what = "llama.cpp refuses the files"
    with running(python, "llamacpp_server.py", settings, what=what, folder=made) as url:
        yield url, notes


def ask_llama(
    engine: Asked,
    server: LlamaServer,
    options: argparse.Namespace,
    target: FrozenTarget,
    prompts: Sequence[Prompt],
    settings: BenchSettings,
) -> None:
    """Ask llama.cpp's server. UserError if it runs another model or makes no drafts."""
    for name, theirs, ours in (
        ("a vocabulary", server.meta.get("n_vocab"), target.vocab_size),
        ("a width", server.meta.get("n_embd"), target.hidden_size),
    ):
        if theirs is not None and theirs != ours:
            raise server.error(f"serves a model with {name} of {theirs}, {target.name} has {ours}; serve the target")
    longest = max(len(prompt.ids) for prompt in prompts) + settings.max_new_tokens
    if longest > server.context:
        raise server.error(f"its context is {server.context}, {longest} are needed; start it with a longer one (-c)")
    version = str(server.props.get("build_info", ""))
    engine.engine = f"{READERS['llama.cpp']}" if not options.server else f"llama.cpp {version}"
    engine.facts["weights"] = server.ftype
    with Progress(f"asking {engine.engine}: answer", len(prompts)) as progress:
        for prompt in prompts:
            engine.answers.append(server.answer(prompt.ids, settings.max_new_tokens))
            progress.advance()
    if options.server and not any(answer.drafted for answer in engine.answers):
        raise server.error("drafts nothing; start it with the head's file (-md) and --spec-type, and read its log")
    engine.depth = len(server.counters()[3]) or None


async def ask_vllm_server(url: str, target: FrozenTarget, prompts: Sequence[Prompt], settings: BenchSettings) -> Asked:
    server = await EngineServer.open(url)
    try:
        if server.engine != "vLLM":
            raise server.error(f"expected vLLM, this is {server.engine}; name its own --engine")
        if not server.depth:
            raise server.error("does not speculate; start it with --speculative-config")
        await server.check_target(target, prompts[0])
        engine = Asked(server.name)
        engine.depth = server.depth
        counters = await server.counters()
        for prompt in prompts:
            found = await server.ask(prompt, Sampling(), settings.max_new_tokens, target.eos_token_ids)
            before = counters
            counters = await server.counters_after(counters, [found])
            by_position = [counters[str(k)] - before[str(k)] for k in range(server.depth)]
            rounds = counters[DRAFTS] - before[DRAFTS]
            drafted = counters[DRAFTED] - before[DRAFTED]
            engine.answers.append(EngineAnswer(found.tokens, rounds, drafted, sum(by_position), by_position))
        return engine
    finally:
        await server.client.aclose()


def ask_program(
    options: argparse.Namespace, target: FrozenTarget, head: Drafter, folder: str, job: dict[str, Any], made: Path
) -> Asked:
    """Run an engine that has no server here, with the head and without."""
    name = options.engine
    kind = kind_of(head)
    python = need_python(name)
    what = f"{READERS[name]} fails"
    files = {"target": local_folder(target.name), "head": folder}
    with Progress(f"running {READERS[name]}", announced=True):
        if name == "vllm":
            return ask_vllm(python, kind, target, folder, job, made)
        if name == "openvino":
            files = export_openvino(options, python, files, head, made)
        found = run_job(python, f"{name}_answers.py", {**job, **files}, what=what, folder=made)
        plain = run_job(python, f"{name}_answers.py", {**job, **files, "head": None}, what=what, folder=made)
    engine = Asked(found["version"])
    engine.answers = [EngineAnswer(**answer) for answer in found["answers"]]
    engine.plain = [answer["tokens"] for answer in plain["answers"]]
    return engine


def export_openvino(
    options: argparse.Namespace, python: Path, files: dict[str, str], head: Drafter, made: Path
) -> dict[str, str]:
    """Return the folders of target and head as OpenVINO's IR, with the layers that the head reads."""
    exported = {"target": options.engine_target, "head": options.engine_head}
    for part, folder in exported.items():
        if folder is not None:
            continue
        exported[part] = str(made / part)
        words = ["-m", files[part], "--task", "text-generation-with-past", "--weight-format", "fp32"]
        words += ["--trust-remote-code"] if part == "head" else []
        run_inside(
            python, "-m", "optimum.commands.optimum_cli", "export", "openvino", *words, exported[part],
            what=f"{files[part]}: OpenVINO's export refuses it", log=made / "log",
        )  # fmt: skip
        if part == "head" and head.aux_layer_ids:
            ids = ",".join(str(k - 1) for k in head.aux_layer_ids)
            what = "the head's IR takes no layers"
            run_inside(python, "openvino_layers.py", exported[part], ids, what=what, log=made / "log")
    return exported


def ask_vllm(python: Path, kind: str, target: FrozenTarget, folder: str, job: dict[str, Any], made: Path) -> Asked:
    methods = {"draft": "draft_model", "dflash2": "dflash", "lilicorr": "dflash", "xpress": "dflash"}
    speculative = {"method": methods.get(kind, kind), "model": folder, "num_speculative_tokens": job["depth"]}
    given = {
        "target": local_folder(target.name),
        "prompts": job["prompts"],
        "new_tokens": job["new_tokens"],
        "ends": job["ends"],
        "rows": 1,
        "options": {"trust_remote_code": True} if target.trust_remote_code else {},
    }
    what = f"{READERS['vllm']} fails"
    found = run_job(python, "vllm_answers.py", {**given, "speculative": speculative}, what=what, folder=made)
    plain = run_job(python, "vllm_answers.py", {**given, "speculative": None}, what=what, folder=made)
    engine = Asked(" ".join(f"{name} {version}" for name, version in found["versions"].items() if "vllm" in name))
    for tokens, rounds in zip(found["tokens"], found["accepted"], strict=True):
        by_position = [sum(count > k for count in rounds) for k in range(job["depth"])]
        engine.answers.append(
            EngineAnswer(tokens, len(rounds), len(rounds) * job["depth"], sum(by_position), by_position)
        )
    engine.plain = plain["tokens"]
    return engine


# The ladder


def climb(ladder: Ladder, engine: Asked, prompts: Sequence[Prompt], bos: int | None) -> tuple[Run, str]:
    """Return the run here, and the answer: the head, the template, the conversion or the engine."""
    say = ladder.lines.append
    with Progress("decoding here", announced=True):
        own = ladder.run()
    ours = tau(own.counts)
    theirs = tau(ladder.answers)
    other = None
    if engine.llama is not None and "tokenizer" not in engine.facts:
        other = other_ids(prompts, engine.llama, bos)
        say(f"template: {other or 'the server makes the same ids of the prompts'}")
    equal_texts = sum(same_text(text, answer) for text, answer in zip(own.texts, ladder.answers, strict=True))
    same_counts = sum(not count_distance(*pair) for pair in zip(own.counts, ladder.answers, strict=True))
    number = len(ladder.answers)
    say(f"texts equal: {equal_texts} of {number}; counts equal: {same_counts} of {number}")
    say(table(own.counts, ladder.answers))
    equal = ladder.distance(own) == ladder.other_texts(own) == 0
    plain, precision = check_plain(ladder, engine, own, equal=equal)
    although = f", although {plain}" if plain else ""
    if equal and other is not None:
        return own, f"the template: {other}; with this runtime's ids tau is {ours:.2f} in both{although}"
    if equal and abs(ours - theirs) >= 0.005:
        return (
            own,
            f"the head: the same texts, tau {ours:.2f} here and {theirs:.2f} there, where the first token is drafted",
        )
    if equal:
        return own, f"the head: tau {ours:.2f} in both{although}"
    if not sum(answer.drafted or answer.accepted or 0 for answer in ladder.answers):
        return own, f"the engine: it drafts nothing: its draft does not fit its target; here tau is {ours:.2f}"
    return own, find_cause(ladder, own, theirs, plain, precision)


def check_plain(ladder: Ladder, engine: Asked, own: Run, *, equal: bool) -> tuple[str | None, Precision | None]:
    """Compare the engine without a draft with this runtime. Return what is wrong with its target, if anything is, and
    the precision that explains it. `equal`: texts and counts are equal, so that a few tokens suffice."""
    if engine.llama is None:
        return compare_plain(ladder, engine.plain) if engine.plain is not None else None, None
    server = engine.llama
    options = ladder.options(0)
    texts = [text[:CHECKED] for text in own.texts] if equal else ladder.plain_texts()
    probes: list[tuple[Any, Any, list[Step]]] = []
    with Progress("asking without a draft: text", len(texts)) as progress:
        for n, (prompt, text) in enumerate(zip(ladder.prompts, texts, strict=True)):
            steps = server.plain_steps(prompt, text)
            if n == 0 and likeliest_gap(ladder.target, options, prompt, text, steps) > FOREIGN:
                raise server.error(
                    f"serves another model than {ladder.target.name}: it chooses unlikely tokens; serve the target"
                )
            probes.append((prompt, text, steps))
            progress.advance()
    same = sum([step.choice for step in steps] == list(text) for _, text, steps in probes)
    quantised = bool(server.ftype) and server.ftype not in ("all F32", "F32")
    found = [(distance_of(ladder.target, options, Precision("as here"), probes), Precision("as here"))]
    base = found[0][0]
    if base > ROUNDING:
        weights = weights_of(server, ladder.target) if quantised else None
        with Progress("trying precisions here", announced=True):
            for precision in precisions(server.ftype, weights):
                found.append((distance_of(ladder.target, options, precision, probes), precision))
    least, best = min(found, key=lambda pair: pair[0])
    explained = least < SHARED * base
    ladder.lines.append(
        f"without a draft: {same} of {len(texts)} texts are this runtime's; log-probabilities differ by {base:.1e} "
        "(root mean square)" + (f", by {least:.1e} where {best.name}" if explained else "")
    )
    if explained:
        return best.name, best
    if quantised:
        return f"its target's weights are {server.ftype}", None
    if base > HALF:
        return "its target computes less precisely than in float32", None
    return (SIXTEEN if base > ROUNDING else None), None


def weights_of(server: LlamaServer, target: FrozenTarget) -> FrozenTarget | None:
    """Return the target with the weights of the server's GGUF file, if the file can be read here."""
    file = Path(str(server.props.get("model_path", "")))
    if not file.is_file():
        return None
    try:
        return load_target(str(file.parent), dtype=target.dtype, device=target.device, gguf_file=file.name)
    except Exception as error:
        raise server.error(f"{file}: its weights cannot be read here ({first_line(error)})") from error


def compare_plain(ladder: Ladder, theirs: Sequence[list[int]]) -> str | None:
    """Compare plain texts. Return what is wrong with the engine's, or None: equal, or apart by rounding."""
    ours = ladder.plain_texts()
    differing = [
        (Request(list(prompt), ladder.new_tokens, ignore_eos=True), other)
        for prompt, text, other in zip(ladder.prompts, ours, theirs, strict=True)
        if other not in (text, text[:-1])
    ]
    found = find_mismatches(ladder.target, differing)
    near = sum(all(mismatch.is_within(FAR) for mismatch in mismatches) for mismatches in found)
    far = len(differing) - near
    ladder.lines.append(
        f"without a draft: {len(ours) - near - far} of {len(ours)} texts are this runtime's"
        + (f", {near} part at a near-tie" if near else "")
    )
    return f"its target writes other texts on {far} prompts, by more than rounding" if far else None


def find_cause(ladder: Ladder, own: Run, theirs: float, plain: str | None, precision: Precision | None) -> str:
    """Return the answer: the cause that reproduces the engine's counts, or what is known of it."""
    ours = tau(own.counts)
    first = parting(ladder, own)
    ladder.lines.append(f"with the draft: {first}")
    base = own
    if precision is not None:
        ladder.rounded = precision
        base = ladder.run()
        ladder.lines.append(f"where {precision.name}: {agreement(ladder, base)}")
    distance = ladder.distance(base)
    others = ladder.other_texts(base)
    least = distance
    named = None
    with Progress("trying what the engine may have read", announced=True):
        for cause in ladder.causes() if distance else ():
            try:
                run = ladder.run(cause.head() if cause.head else None, cause.depth)
            except UserError:  # the head cannot be such a one
                continue
            if ladder.distance(run) < min(least, REPRODUCED * distance):
                least = ladder.distance(run)
                named = (cause, run)
            if least == 0:
                break
    if named is not None:
        cause, run = named
        ladder.lines.append(f"where {cause.name}: {agreement(ladder, run)}")
        there = "as in the engine" if least == others == 0 else f"{theirs:.2f} in the engine"
        also = f"; besides, {plain}" if plain else ""
        return (
            f"{cause.by}: {cause.name}; as trained this head has tau {tau(base.counts):.2f}, so "
            f"{tau(run.counts):.2f}, {there}{also}"
        )
    if precision is not None:
        there = "as in the engine" if distance == others == 0 else f"{theirs:.2f} in the engine"
        return (
            f"the engine: {precision.name}; so this head has tau {tau(base.counts):.2f} here, {there}, and {ours:.2f} "
            "at this runtime's precision"
        )
    if plain is not None:
        return f"the engine: {plain}; tau {ours:.2f} here, {theirs:.2f} there"
    if near_ties(ladder, own):
        return f"rounding: where texts part, two tokens are as likely; tau {ours:.2f} here, {theirs:.2f} there"
    return f"the engine: no known behaviour reproduces its counts; tau {ours:.2f} here, {theirs:.2f} there; {first}"


def near_ties(ladder: Ladder, own: Run) -> bool:
    """Return True if all texts that differ part where two tokens are as likely, and the counts of the others agree."""
    differing = []
    for prompt, text, count, answer in zip(ladder.prompts, own.texts, own.counts, ladder.answers, strict=True):
        if not same_text(text, answer):
            differing.append((Request(list(prompt), ladder.new_tokens, ignore_eos=True), answer.tokens))
        elif count_distance(count, answer):
            return False
    found = find_mismatches(ladder.target, differing)
    return all(mismatch.is_within(FAR) for mismatches in found for mismatch in mismatches)


def agreement(ladder: Ladder, run: Run) -> str:
    pairs = list(zip(run.texts, run.counts, ladder.answers, strict=True))
    texts = sum(same_text(text, answer) for text, _, answer in pairs)
    both = sum(same_text(text, answer) and not count_distance(count, answer) for text, count, answer in pairs)
    return f"{texts} of {len(pairs)} texts are the engine's, {both} with its counts"


def parting(ladder: Ladder, own: Run) -> str:
    """Return where this runtime and the engine first part."""
    for n, (text, count, answer) in enumerate(zip(own.texts, own.counts, ladder.answers, strict=True), start=1):
        if not same_text(text, answer):
            place = first_difference(text, answer.tokens) or 0
            here = text[place : place + 1]
            there = answer.tokens[place : place + 1]
            return f"they first part in prompt {n}, at token {place}: {here} here, {there} there"
        if count_distance(count, answer):
            return f"they first part in prompt {n}, of equal text: {counts_of(count)} here, {counts_of(answer)} there"
    return "they do not part"


def counts_of(answer: EngineAnswer) -> dict[str, Any]:
    names = ("rounds", "drafted", "accepted", "by_position")
    return {name: value for name in names if (value := getattr(answer, name)) is not None}


def table(ours: Sequence[EngineAnswer], theirs: Sequence[EngineAnswer]) -> str:
    """Return both sides' counts over all prompts."""
    parts = []
    for who, answers in (("here", ours), ("engine", theirs)):
        words = []
        for name in ("rounds", "drafted", "accepted"):
            values = [getattr(answer, name) for answer in answers]
            if None not in values:
                words.append(f"{name} {sum(values)}")
        columns: Counter[int] = Counter()
        for answer in answers:
            columns.update(dict(enumerate(answer.by_position or ())))
        if columns:
            words.append(f"by position {' '.join(str(columns[k]) for k in sorted(columns))}")
        parts.append(f"{who}: {', '.join(words)}, tau {tau(answers):.2f}")
    return "; ".join(parts)


def write_parity(record: ParityRecord, out: Path) -> None:
    """Write the record and its page."""
    write_record(record.model_dump(), out / "parity.json")
    rows = ["| prompt | text | here | engine |", "|---|---|---|---|"]
    for request in record.requests:
        same = "equal" if request.texts_equal else f"differs at {request.first_difference}"
        cells = [
            ", ".join(f"{name} {value}" for name, value in part.items()) for part in (request.here, request.engine)
        ]
        rows.append(f"| {request.prompt} | {same} | {cells[0]} | {cells[1]} |")
    facts = "".join(f", {name} {value}" for name, value in record.facts.items() if value)
    text = [
        f"# {record.kind} here and in {record.engine}",
        f"**{record.answer}**",
        f"Head {record.head}, target {record.target}, chain:{record.depth}, greedy{facts}; {record.measured_at[:10]}.",
        "\n".join(f"* {line}" for line in record.lines),
        "\n".join(rows),
        f"```bash\n{shlex.join(record.command)}\n```",
    ]
    write_text(out / "parity.md", "\n\n".join(text) + "\n")
