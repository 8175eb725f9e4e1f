"""Loading of a head, its target and prompts from the options of a command line."""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
from transformers import PreTrainedTokenizerBase

from eval.core.command_line import print_line
from eval.core.progress import Progress
from eval.data.chat_template import chat_template_of
from eval.data.prompts import Prompt, follow_up, load_prompts, split_prompts, windows
from eval.data.rendered_text import unknown_token
from eval.data.template_arguments import arguments_read, with_arguments
from eval.measure.machine import setup_line
from eval.records.measure_settings import BenchSettings
from eval.runtime.engine import Engine, EngineOptions, Request
from heads.core.contract import Drafter, split_draft
from heads.core.errors import UserError
from heads.methods.two_drafts import LookupFirst
from heads.published import is_published, open_any
from heads.registry import build_untrained, untrained_kind
from heads.saved import find_head, read_config
from heads.targets.frozen_target import FrozenTarget
from heads.targets.hub import MODEL, is_here, repo_and_revision
from heads.targets.load import load_target_and_tokenizer


class Opened(NamedTuple):
    head: Drafter
    target: FrozenTarget
    tokenizer: PreTrainedTokenizerBase


def open_head(options: argparse.Namespace) -> Opened:
    target, tokenizer = open_target_of(options.head, options)
    return Opened(fitting_head(options.head, target), target, tokenizer)


def open_target_of(head: str, options: argparse.Namespace) -> tuple[FrozenTarget, PreTrainedTokenizerBase]:
    """Load the target of a head. Options that are not given are those of its training. Raise
    UserError if neither the command line nor the head names the target."""
    _, head = split_draft(head)
    if untrained_kind(head) or is_published(head):
        if not options.target:
            raise UserError(f"{head}: does not name its target; give --target")
        return open_target(options.target, options)
    folder = find_head(head)
    record = read_config(folder)["target"]
    path = options.target or record.get("name")
    if not isinstance(path, str):
        raise UserError(f"{folder}: does not say which target it was trained for; give --target")
    if not options.target and not is_here(path) and not MODEL.fullmatch(repo_and_revision(path)[0]):
        raise UserError(f"{path}: no such folder; {folder} names it as its target: give another copy with --target")
    if not options.target and Path(path).is_relative_to(Path.cwd()):
        path = os.path.relpath(path)  # records say the same on every machine
    return open_target(path, options, record)


def fitting_head(head: str, target: FrozenTarget) -> Drafter:
    """Return the draft with this name or path: a head, trained or untrained, or a lookup and a head. Raise UserError if
    it was trained for another target."""
    match, path = split_draft(head)
    if match is not None:
        return LookupFirst(match, fitting_head(path, target), target.device)
    if untrained_kind(head):
        return cast(Drafter, build_untrained(head, target))
    drafter = cast(Drafter, open_any(head, target).to(device=target.device, dtype=target.dtype).eval())
    for line in drafter.origin.differs if drafter.origin else ():
        print_line(f"{head}: {line}")
    if not is_published(head):
        template = read_config(find_head(head))["target"].get("template") or {}
        if template != target.template:
            print_line(f"{head}: was trained with template arguments {template}, and is given {dict(target.template)}")
    return drafter


def open_target(
    path: str, options: argparse.Namespace, record: Mapping[str, Any] = MappingProxyType({})
) -> tuple[FrozenTarget, PreTrainedTokenizerBase]:
    """Load a target with the options of the command line. `record`: a head's record of its target, whose adapter and
    GGUF file are opened, and whose quantisation and template arguments are taken if the options do not set them. Raise
    UserError for a device that this machine does not have and for an argument that the template does not read."""
    try:
        device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.ones(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError):  # depends on the kind of device that is missing
        raise UserError(f"--device {options.device}: not on this machine; use cpu, for example") from None
    scheme = options.quantize or record.get("quantize")
    chosen: bool | None = options.fix_mistral_regex
    if chosen is None:
        chosen = record.get("fix_mistral_regex")
    target, tokenizer = load_pair(
        path,
        dtype=options.dtype,
        device=device,
        trust_remote_code=options.trust_remote_code,
        quantize=None if scheme == "none" else scheme,
        adapter=record.get("adapter"),
        gguf_file=record.get("gguf_file"),
        fix_mistral_regex=chosen,
        template=(record.get("template") or {}) if options.template is None else options.template,
    )
    print_line(setup_line(target))
    known = arguments_read(tokenizer.chat_template or "", tokenizer) if options.template else None
    if known is not None and (unread := sorted(options.template.keys() - known)):
        names = ", ".join(known) or "none"
        raise UserError(f"--template: the chat template has no argument {unread[0]!r}; it has {names}")
    if options.template is None and not record:
        say_defaults(path, tokenizer)
    return target, with_arguments(tokenizer, target.template)


def say_defaults(path: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Print which arguments of a chat template are left at their defaults and change the prompts."""
    if tokenizer.chat_template is not None:
        line, other = chat_template_of(tokenizer).left_at_default
        if line:
            print_line(f"{path}: {line}; a head trained with another value needs it here, as --template {other}")


def load_pair(path: str, **how: Any) -> tuple[FrozenTarget, PreTrainedTokenizerBase]:
    """Return what `heads.targets.load.load_target_and_tokenizer` does, and show that it takes a while."""
    with Progress(f"loading {path}", announced=True):
        return load_target_and_tokenizer(path, **how)


def prompt_room(name: str, context_length: int, max_new_tokens: int, max_nodes: int) -> int:
    """Return the maximum length of a prompt in the context of a model. Raise UserError if it is less than 1."""
    room = context_length - max_new_tokens - max_nodes
    if room < 1:
        raise UserError(
            f"{max_new_tokens} new tokens and a tree of {max_nodes} nodes leave no room for a prompt in the "
            f"{context_length} positions of {name}; ask for fewer new tokens"
        )
    return room


def choose_prompts(
    target: FrozenTarget,
    tokenizer: PreTrainedTokenizerBase,
    settings: BenchSettings,
    max_nodes: int,
    context: int | None = None,
) -> list[Prompt]:
    """Return the prompts of every suite that fit with their output and a tree of `max_nodes`, including later turns of
    conversations. A later turn follows the target's own greedy answers. With a `context`, return prompts of so many
    tokens, cut from the suites' texts: `num_prompts` of each, or two of the largest batches."""
    room = prompt_room(target.name, target.context_length, settings.max_new_tokens, max_nodes)
    limit = min(settings.max_prompt_tokens or room, room)
    if context is not None:
        if context > room:
            raise UserError(
                f"--context {context}: with {settings.max_new_tokens} new tokens and a tree of {max_nodes} nodes "
                f"{target.name} has room for {room}; ask for shorter ones"
            )
        count = settings.num_prompts or 2 * max(batch_size for _, batch_size in settings.points)
        suites = split_prompts(settings.prompts)
        return [prompt for suite in suites for prompt in windows(suite, tokenizer, context, count, target.vocab_size)]
    length = limit + settings.max_new_tokens + 1
    engine = Engine(target, None, EngineOptions(batch_size=settings.batch_size, max_length=length))

    def answer(prompts: Sequence[Prompt]) -> list[list[int]]:
        answers = engine.generate([Request(list(p.ids), settings.max_new_tokens) for p in prompts])
        return [answer.written for answer in answers]

    return load_suites(settings, tokenizer, limit, answer, target.vocab_size)


def load_suites(
    settings: BenchSettings,
    tokenizer: PreTrainedTokenizerBase | None,
    limit: int,
    answer: Callable[[Sequence[Prompt]], Sequence[Sequence[int] | str]],
    vocab_size: int | None = None,
) -> list[Prompt]:
    """Return the prompts of every suite of at most `limit` tokens, all of them below `vocab_size` if it is known,
    including later turns of conversations, which follow the tokens or texts of `answer`. Without a tokenizer, prompts
    have messages and no token ids."""
    prompts: list[Prompt] = []
    for suite in split_prompts(settings.prompts):
        prompts += load_prompts(
            suite,
            tokenizer,
            num_prompts=settings.num_prompts,
            max_prompt_tokens=limit,
            seed=settings.seed,
            skip_long=settings.skip_long,
            vocab_size=vocab_size,
        )
    unfinished = [prompt for prompt in prompts if prompt.later_turns]
    while unfinished:
        answers = zip(unfinished, answer(unfinished), strict=True)
        following = [follow_up(prompt, written, tokenizer) for prompt, written in answers]
        # Not an error: the file's first turn fits. An answer may spell a token that the target has no row for.
        following = [
            prompt
            for prompt in following
            if len(prompt.ids) <= limit and not unknown_token(prompt.ids, tokenizer, vocab_size)
        ]
        prompts += following
        unfinished = [prompt for prompt in following if prompt.later_turns]
    return prompts
