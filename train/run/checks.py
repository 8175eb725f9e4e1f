"""The checks of a recipe that need neither the target's weights nor its whole data: a run makes them before it costs
anything, and a plan makes them, too."""

import os
from pathlib import Path

from eval.core.command_line import AUTO
from eval.data.chat_template import ChatTemplate
from eval.data.data_files import is_local, read_records
from eval.data.prompts import HUB_SUITES, check_suites, split_prompts
from eval.measure.draft_search import LARGEST_TREE
from eval.runtime.sampling_params import check_rule
from heads.core.contract import HEAD_TREE, DraftHead, max_nodes
from heads.core.errors import UserError
from heads.core.tree import parse_shape
from heads.targets.frozen_target import FrozenTarget
from heads.targets.hub import is_hub_id
from heads.targets.merge_adapter import check_adapter
from heads.targets.quantization import quantizer
from train.data.prepare import check_data
from train.data.sources import ChatSource, RecordSource
from train.recipe.recipe import Eval, Recipe
from train.run.open_run import tokenizer_of
from train.run.run_folder import RunFolder
from train.steps.accelerate_launch import trackers_of


def check_fit(recipe: Recipe, target: FrozenTarget, head: DraftHead) -> int:
    """Raise UserError for a recipe whose parts do not fit each other. `target` and `head` may be shapes. Return the
    nodes of the largest tree that is measured."""
    if recipe.train.save_dtype == "float32" and target.dtype.itemsize < 4:
        raise UserError(
            "train.save_dtype: a head is measured in the dtype of its target, "
            f"{str(target.dtype).removeprefix('torch.')}; give target.dtype=float32, or leave save_dtype out"
        )
    if recipe.target.quantize is not None and target.quantize is None:  # a shape
        quantizer(target.layers, recipe.target.quantize, target.name)
    check_data(recipe.data, target, head)
    return check_trees(recipe.eval, target, head)


def check_trees(settings: Eval, target: FrozenTarget, head: DraftHead) -> int:
    """Raise UserError for trees that the head cannot fill or that leave no room for a prompt. Return the nodes of the
    largest."""
    trees = [settings.tree, *(settings.report.tree or [])]
    for tree in trees:
        if tree != AUTO:
            target.check_shape(None if tree == HEAD_TREE else parse_shape(tree))
    nodes = max(LARGEST_TREE if tree == AUTO else max_nodes(tree, head) for tree in trees)
    for shape in map(parse_shape, set(trees) - {AUTO, HEAD_TREE}):
        head.check_draft(shape)
        check_rule(settings.rule, shape)
    if HEAD_TREE in trees and settings.rule != "match":
        raise UserError(
            f"rule {settings.rule}: the tree 'head' is grown from ranks, and may leave out a draw; use rule match"
        )
    new_tokens = max(settings.max_new_tokens, settings.report.max_new_tokens or 0)
    if target.context_length - new_tokens - nodes < 1:
        raise UserError(
            f"eval.max_new_tokens: {new_tokens} new tokens and a tree of {nodes} nodes leave no room for a prompt in "
            f"the {target.context_length} positions of {target.name}; lower it (or eval.report.max_new_tokens)"
        )
    return nodes


def check_places(recipe: Recipe) -> None:
    """Raise UserError for a folder that cannot be written to, for files that cannot be read, and for chat data without
    a chat template, if the target's tokenizer is there. Nothing is fetched."""
    folder = Path(recipe.output_dir)
    if os.environ.get("RANK", "0") == "0":
        run = RunFolder(folder)
        run.lock()
        run.unlock()
    trackers_of(recipe.tracking)
    if recipe.target.adapter is not None:
        check_adapter(recipe.target.adapter)
    suites = [name for name in split_prompts(recipe.eval.prompts) if name not in HUB_SUITES]
    check_suites(",".join(name for name in suites if Path(name).parent != folder))  # a derived recipe writes its own
    try:
        rendering = ChatTemplate(tokenizer_of(recipe.target))
    except UserError:
        rendering = None  # a run is refused when it loads its target
    for source in recipe.data.sources:
        if isinstance(source, ChatSource) and rendering is not None:
            source.template(rendering)
        if isinstance(source, RecordSource) and (is_local(source.path) or not is_hub_id(source.path)):
            next(RecordSource.records(source), None)
        held_out = getattr(source, "held_out", None)
        if held_out is not None and Path(held_out).parent != folder:
            next(read_records(held_out), None)
