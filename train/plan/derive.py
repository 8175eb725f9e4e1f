"""A recipe derived from a model and conversations: train/NAME.py --model MODEL --data DATA [key.sub=value ...].

It is the tree of plain values that a YAML file would hold: what the command line sets, filled in from the model's
config, the lengths of the conversations and the device's memory. The same command derives the same recipe again, so it
resumes its run.
"""

import argparse
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from eval.core.command_line import print_line
from eval.data.data_files import read_records
from eval.data.prompts import split_prompts
from eval.records.result_folders import plain_name, short_name
from heads.core.engines import READERS, Served
from heads.core.errors import UserError
from heads.core.files import check_folder, is_file, write_text
from heads.methods.method_settings import METHODS, DraftBlockSettings
from train.core.strict_yaml import Source, overridden
from train.data.data_settings import Answers, Data
from train.data.dialogues import first_turns
from train.data.sources import ChatSource
from train.plan.survey import MIN_HELD_OUT, Survey, Turns, check_survey, read_conversations
from train.recipe.head_section import HeadSection
from train.recipe.recipe import KINDS, OWN, Recipe, check_kind, checked, dump_recipe

if TYPE_CHECKING:
    from eval.data.chat_template import ChatTemplate
    from train.plan.memory_and_flops import Launch, Plan

HELD_OUT = "held-out.jsonl"
EPOCHS, MAX_EPOCHS, FEW_STEPS = 8, 20, 1_000
"""Times that a run reads its data: more, up to a bound, where it would take fewer steps than `FEW_STEPS`."""
MIN_CHECKPOINT_STEPS = 50
"""Least steps between checkpoints, of which there are four in a run of many steps."""
DEPTH = 5
"""Tokens that a draft model drafts in a round."""
SMALL_VOCABULARY = 6144
"""A target with at most this many tokens is drafted whole."""
SHAPED = {"init_from", "path", "layers", "fresh"}
"""Settings of a head that give it a shape, so that none is derived."""
DATA_ENDING = r"(\.jsonl?|\.parquet)?(\.gz)?$"
ADAMW_RATE = 1 / 3
"""Best rate of AdamW alone as a share of Muon's: 2e-3 of 6e-3 on the quickstart's target, 1e-3 of 3e-3 on SmolLM2-135M
(eval/results/LAB.md)."""


class Size(NamedTuple):
    """Sizes of a run on one type of device."""

    prompt_tokens: int
    new_tokens: int
    step_tokens: int
    answered: int
    """Prompts that the target answers together."""
    measured: int
    """New tokens of a prompt in measurements."""
    batch_sizes: tuple[int, ...]
    repeats: int
    memory: float
    """Fraction of the memory that the plan may fill."""


SIZES = {
    "cpu": Size(512, 256, 1024, 16, 96, (1, 4), 1, 0.5),
    "cuda": Size(1024, 1024, 16384, 32, 256, (1, 4, 16), 2, 0.9),
}


def derived_recipe(options: argparse.Namespace, name: str) -> Recipe:
    """Derive a recipe for train/NAME.py, print it and its plan, and save it in the run's folder. UserError if the
    device has too little memory for it, unless the options have --plan."""
    source = begin(options, KINDS[name])
    first = checked(source)
    check_kind(first, source.file, name)
    if not all(isinstance(each, ChatSource) for each in first.data.sources):
        raise UserError("data.sources: a recipe is derived for sources of kind chat; write a recipe for texts")
    folder = Path(first.output_dir)
    check_folder(folder, "output_dir")

    from eval.pages.card import check_card
    from train.plan.memory_and_flops import GIB
    from train.plan.plan_lines import launch_of, print_plan
    from train.run.run_folder import RunFolder

    check_card(folder, "output_dir")
    launch = launch_of(options, first)
    plan, held_out = derive(source, first, launch)
    if os.environ.get("RANK", "0") == "0":
        print(f"\n{dump_recipe(source.tree)}")
    print_plan(plan, options.tflops)
    has_begun = any((folder / "checkpoints").glob("step-*"))
    if os.environ.get("LOCAL_RANK", "0") == "0" and not has_begun:
        if held_out:
            write_text(folder / HELD_OUT, held_out)
        command = f"train/{name}.py --model {options.model} --data {options.data}"
        RunFolder(folder).write_recipe(source.tree, f"The recipe that {command} derived.")
    if options.plan:
        print_line(f"the recipe is in {folder / OWN}; the same command without --plan trains it")
    elif (missing := sum(plan.device().values()) - launch.memory_bytes) > 0:
        raise UserError(
            f"the run needs {missing / GIB:.1f} GiB more than the device has; its plan says what saves memory"
        )
    return plan.recipe


def begin(options: argparse.Namespace, kind: str) -> Source:
    """Return the settings with which a derivation begins: the options, the overrides, and what else `checked` asks
    for."""
    for option, what in (("model", "a folder or a Hub id"), ("data", "a file, a folder or the Hub id of a data set")):
        if not getattr(options, option):
            raise UserError(f"--{option}: is missing, {what}; give --model and --data, or a recipe")
    if recipe := next((word for word in options.overrides if re.fullmatch(r"[^=]+\.ya?ml", word)), None):
        raise UserError(
            f"{recipe}: --model and --data are in place of a recipe; leave it out, or leave them out and give it "
            f"target.path={options.model} 'data.sources=[{{kind: chat, path: {options.data}}}]'"
        )
    model, data = (plain_name(short_name(path)) for path in (options.model, options.data))
    tree: dict[str, object] = {
        "output_dir": f"runs/{kind}-{model}-{re.sub(DATA_ENDING, '', data)}",
        "target": {"path": options.model},
        "head": {"kind": kind},
        "data": {"sources": [{"kind": "chat", "path": options.data}], "regenerate": {"temperature": 0.7}},
        "train": {"optimizer": "muon", "min_lr_ratio": 0.02},
        "eval": {"skip_long": True},
    }
    source = overridden(tree, "the derived recipe", options.overrides)
    fill(source.tree, "eval", prompts=os.path.join(str(source.tree["output_dir"]), HELD_OUT))
    train = source.tree["train"]
    if isinstance(train, dict) and train.get("max_steps") is None:
        train["max_steps"] = f"{EPOCHS} epochs"
    return source


def fill(tree: dict[str, object], key: str, /, **values: object) -> None:
    """Give the section with a dotted key those settings that it does not have yet, unless it is null."""
    section: Any = tree
    for part in key.split("."):
        section = section.setdefault(part, {}) if isinstance(section, dict) else None
    for name, value in values.items() if isinstance(section, dict) else ():
        section.setdefault(name, value)


class Lengths(NamedTuple):
    """Most tokens of a prompt and of an answer, and those of a row."""

    prompt: int
    answer: int
    row: int


def derive(source: Source, first: Recipe, launch: "Launch") -> tuple["Plan", str]:
    """Fill in what the settings of `source`, which are those of `first`, lack. Return the plan of the recipe, and the
    text of its file of held-out conversations, which is empty if `eval.prompts` is another file or a suite."""
    from heads.targets.hf_decoder import positions_of
    from heads.targets.target_files import load_config

    tree, size, data = source.tree, SIZES[launch.device], first.data
    files = first.target.model_dump(include={"trust_remote_code", "gguf_file"})
    whole = load_config(first.target.path, **files)
    config = whole.get_text_config()
    rendering = fill_template(source, first)
    most = most_lengths(data, positions_of(config), size)
    survey = read_conversations(data.sources, rendering, most.prompt)
    check_survey(survey, data.sources, most.prompt)
    lengths = fitting_lengths(data, survey, most)
    fill(tree, "data", context_length=lengths.row)

    chosen, held_out = hold_out(tree, first, survey)
    trained = {turns: length for turns, length in survey.lengths.items() if turns not in chosen}
    if not trained:
        raise UserError(
            f"eval.prompts {first.eval.prompts}: holds all conversations of the data, so none is left to train on"
        )
    number = sum(survey.counts[turns] for turns in trained)
    line = f"{number:,} of {survey.records:,} records are trained on, {len(chosen)} conversations are held out"
    # Of conversations that are held out from here, one record each is in the file.
    if same := sum(survey.counts[turns] for turns in chosen) - (len(chosen) if held_out else 0):
        line += f"; {same:,} records with the first prompt of one of them are left out"
    print_line(line)
    fill(tree, "data.regenerate", prompt_tokens=lengths.prompt, new_tokens=lengths.answer, batch_size=size.answered)
    if len(data.sources) == 1:
        fill(tree, "data.regenerate", prompts=number)

    fill(tree, "target", dtype="float32" if launch.device == "cpu" else "bfloat16")
    if not SHAPED & first.head.model_fields_set:
        settings = head_settings(first.head, config.num_hidden_layers, config.vocab_size, lengths.row)
        fill(tree, "head", **settings, **served_form(first.head, whole))
    tokens = sum(survey.counts[turns] * (length + lengths.answer / 2) for turns, length in trained.items())
    batch_sizes = fill_steps(source, first, launch, lengths, tokens)
    optimizer = launch.optimizer(first.train.optimizer)
    if not {"train", "train.optimizer"} & source.overrides.keys():
        tree["train"]["optimizer"] = optimizer
    rate = METHODS[first.head.kind].rate * (ADAMW_RATE if optimizer == "adamw" else 1)
    fill(tree, "train", lr=float(f"{rate / config.hidden_size:.1e}"))
    plan = largest_batch(source, launch, batch_sizes, size.memory * launch.memory_bytes)
    if (epochs := plan.recipe.train.epochs) is not None:
        plan.likely_steps = math.ceil(epochs * tokens / plan.step_tokens)
    depth = DEPTH if first.head.kind == "draft" else len(plan.head.depth_weights)
    fill_measurements(tree, depth, lengths.prompt, len(chosen) or MIN_HELD_OUT, size)
    plan.recipe = checked(source)
    return plan, held_out


def fill_template(source: Source, first: Recipe) -> "ChatTemplate":
    """Switch a chat template's thinking off, and return the template with its arguments."""
    from train.run.open_run import fit_template, rendering_of, tokenizer_of

    tokenizer = tokenizer_of(first.target)
    for each in first.data.sources:
        assert isinstance(each, ChatSource)
        if name := each.template(rendering_of(first, tokenizer)).thinking_argument:
            fill(source.tree, "data.template", **{name: False})
    template = first.data.model_copy(update={"template": source.tree["data"].get("template") or {}})
    return rendering_of(fit_template(first.model_copy(update={"data": template}), source.overrides), tokenizer)


def most_lengths(data: Data, positions: int, size: Size) -> Lengths:
    """Return the lengths that a target with so many positions and the device allow. UserError if an answer leaves no
    room for a prompt."""
    given = data.regenerate or Answers()
    row = data.context_length if "context_length" in data.model_fields_set else positions
    answer = given.new_tokens if "new_tokens" in given.model_fields_set else min(size.new_tokens, row // 2)
    if answer >= row:
        raise UserError(f"data.regenerate.new_tokens: expected less than {row}, the tokens of a row, got {answer}")
    if "prompt_tokens" in given.model_fields_set:
        return Lengths(given.prompt_tokens, answer, row)
    return Lengths(max(1, min(size.prompt_tokens, row - answer)), answer, row)


def fitting_lengths(data: Data, survey: Survey, most: Lengths) -> Lengths:
    """Return lengths that are not larger than the conversations need."""
    given = data.regenerate or Answers()
    prompt = most.prompt
    if "prompt_tokens" not in given.model_fields_set and 10 * survey.with_turns < survey.records:
        longest = max(survey.lengths.values())
        prompt = min(prompt, up_to(64, longest))  # those of later turns follow from the answers
    if "context_length" in data.model_fields_set:
        return Lengths(prompt, most.answer, data.context_length)
    return Lengths(prompt, most.answer, min(most.row, up_to(128, prompt + most.answer)))


def hold_out(tree: dict[str, Any], first: Recipe, survey: Survey) -> tuple[set[Turns], str]:
    """Return the conversations that are held out, and the text of their file, which is empty if `eval.prompts` is
    another file or a suite. Every source leaves them out."""
    prompts, text = first.eval.prompts, ""
    if prompts == os.path.join(first.output_dir, HELD_OUT):
        candidates = survey.held_out()
        chosen = {candidate.turns for candidate in candidates}
        text = "".join(f"{candidate.text}\n" for candidate in candidates)
    elif not is_file(prompts) and any(map(is_file, split_prompts(prompts))):
        raise UserError(f"eval.prompts {prompts}: expected suites, or one file, whose conversations are held out")
    else:
        records = read_records(prompts) if is_file(prompts) else iter(())
        chosen = {turns for record in records if (turns := first_turns(record)) is not None}
    for each in tree["data"]["sources"] if is_file(prompts) or text else ():
        each.setdefault("held_out", prompts)
    return chosen, text


def fill_steps(source: Source, first: Recipe, launch: "Launch", lengths: Lengths, tokens: float) -> list[int]:
    """Fill in the tokens of a step and the length of a run over so many tokens. Return the batch sizes of a process
    that divide a step, the largest first."""
    tree, train, size = source.tree, first.train, SIZES[launch.device]
    everywhere = lengths.row * launch.processes  # tokens of one row in every process
    rows = max(1, (train.tokens_per_step or size.step_tokens) // everywhere)  # of one process
    batch_sizes = [batch for batch in range(rows, 0, -1) if rows % batch == 0]
    if "batch_size" in train.model_fields_set:
        rows = up_to(train.batch_size, rows)
        batch_sizes = [train.batch_size]
    fill(tree, "train", tokens_per_step=rows * everywhere)
    epoch = tokens / (rows * everywhere)  # in steps
    epochs = train.epochs
    if epochs is not None and not {"train", "train.max_steps"} & source.overrides.keys():
        epochs = min(max(EPOCHS, math.ceil(FEW_STEPS / epoch)), MAX_EPOCHS)
        tree["train"]["max_steps"] = f"{epochs} epochs"
    steps = train.steps if epochs is None else math.ceil(epochs * epoch)
    print_line(
        f"about {steps:,} steps, if answers have {lengths.answer // 2} tokens on average; the plan has also the most"
    )
    every = max(MIN_CHECKPOINT_STEPS, -(-steps // 4))
    fill(tree, "train", warmup_steps=steps // 20, checkpoint_every=every, batch_size=batch_sizes[0])
    return batch_sizes


def largest_batch(source: Source, launch: "Launch", batch_sizes: Sequence[int], memory: float) -> "Plan":
    """Return the plan with the first of the batch sizes that fits into so many bytes, or with the last one."""
    from train.plan.memory_and_flops import Plan

    plan = Plan(checked(source), launch)
    for batch_size in batch_sizes:
        source.tree["train"]["batch_size"] = batch_size
        settings = plan.recipe.train.model_copy(update={"batch_size": batch_size})
        plan.recipe = plan.recipe.model_copy(update={"train": settings})
        if sum(plan.device().values()) <= memory:
            break
    return plan


def fill_measurements(tree: dict[str, Any], depth: int, prompt_tokens: int, num_prompts: int, size: Size) -> None:
    chains = [f"chain:{k}" for k in dict.fromkeys([depth, -(-depth // 2), 2, 1]) if k <= depth]
    trees = ["head", *chains] if tree["head"].get("tree_nodes") else chains
    fill(
        tree,
        "eval",
        num_prompts=MIN_HELD_OUT,
        max_prompt_tokens=prompt_tokens,
        max_new_tokens=size.measured,
        tree=trees[0],
    )
    fill(tree, "eval.report", num_prompts=num_prompts, tree=trees, temperature=[0, 1])
    fill(tree, "eval.report", batch_size=list(size.batch_sizes), repeats=size.repeats)


def head_settings(head: Any, layers: int, vocabulary: int, context: int) -> dict[str, object]:
    """Return the settings of a head that are not the defaults of its kind, for a target of so many layers and tokens
    and for rows of `context` tokens."""
    if isinstance(head, DraftBlockSettings):
        return {"num_layers": min(5, max(1, layers // 6)), "num_anchors": min(512, context // 2)}
    draft_layers = min(max(3, layers // 8), max(1, layers // 2))  # spread over the target's
    by_kind: dict[str, dict[str, object]] = {
        "eagle3": {"depth": 5},
        "medusa": {"depth": 4, "loss": "kl", "tree_nodes": 32},
        "draft": {"layers": [n * (layers - 1) // max(1, draft_layers - 1) for n in range(draft_layers)]},
    }
    settings = by_kind.get(head.kind, {})
    if head.kind in ("eagle3", "medusa") and vocabulary > SMALL_VOCABULARY:
        settings["draft_vocab_size"] = min(32000, vocabulary // 3)
    return settings


def served_form(head: HeadSection, config: Any) -> dict[str, object]:
    """Return the engines that a head is for, by default all that serve EAGLE-3 heads of the target, and the settings
    that these read. Print the choice in one line."""
    from heads.formats.eagle3 import READERS as EAGLE3_READERS

    width, top_k = config.get_text_config().hidden_size, 16
    if head.kind == "dflash2" and "llama.cpp" in (head.serve or ()):
        while top_k * (top_k + 1) > width:
            top_k -= 1
        return {} if top_k == 16 else {"selector_top_k": top_k}
    if head.kind != "eagle3":
        return {}
    (target,) = getattr(config, "architectures", None) or [""]
    readers = {name: EAGLE3_READERS[READERS[name]] for name in get_args(Served) if READERS[name] in EAGLE3_READERS}
    serve = list(head.serve or (name for name, reader in readers.items() if target in reader.targets))
    normed = [name for name in serve if {"fc_norm", "norm_output"} <= readers[name].options]
    norms = normed == serve
    form = "with fc_norm and norm_output" if norms else "plain"
    more = f"; head.serve=[{','.join(normed)}] adds fc_norm and norm_output" if normed and not norms else ""
    print_line(f"the head is {form}, for {', '.join(serve) or 'no engine'}{more}")
    return {"fc_norm": norms, "norm_output": norms, **({"serve": serve} if serve else {})}


def up_to(multiple: int, number: int) -> int:
    return -(-number // multiple) * multiple
