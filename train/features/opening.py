"""Opening of the source of features that a recipe chooses."""

from collections.abc import Callable
from functools import partial

from accelerate import Accelerator
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedTokenizerBase

from heads.errors import UserError
from heads.target.load import Place
from heads.target.model import FrozenTarget
from heads.target.placement import drop_layers, shard_layers
from train.features.cached import CachedFeatures
from train.features.settings import AnyFeatures, CacheFeatures, ProcessFeatures, ShardedFeatures
from train.features.source import FeatureSource, has_room
from train.features.vllm import ServedFeatures
from train.launch import load_recipe_target
from train.processes import on_main
from train.recipe import Recipe
from train.step import rows_per_step


def open_source(
    settings: AnyFeatures,
    recipe: Recipe,
    accelerator: Accelerator,
    say: Callable[[str], None],
) -> tuple[FeatureSource, PreTrainedTokenizerBase]:
    """Return the source of features for `settings`, with the target of a recipe, and the target's tokenizer. Called by
    every process."""
    load = partial(load_recipe_target, recipe.target, accelerator)
    if isinstance(settings, ProcessFeatures):
        target, tokenizer = load()
        return FeatureSource(target), tokenizer
    if isinstance(settings, ShardedFeatures):
        target, tokenizer = load(place=sharding(accelerator))
        return FeatureSource(target, _copy(load, target, accelerator, say)), tokenizer
    target, tokenizer = load(place=drop_layers)
    load_whole = _copy(load, target, accelerator, say)
    if isinstance(settings, CacheFeatures):
        return CachedFeatures(target, settings, accelerator.mixed_precision, load_whole=load_whole), tokenizer
    world = accelerator.num_processes
    rows = rows_per_step(recipe.train, recipe.data.context_length, world) // world
    return ServedFeatures(target, settings, rows, accelerator, load_whole=load_whole), tokenizer


def sharding(accelerator: Accelerator) -> Place:
    """Return the placement that shards the target's layers over all processes. Called by every process."""
    if accelerator.num_processes == 1:
        raise UserError("features.kind: sharded needs several processes; launch them, or use features.kind=process")
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    return lambda target, _, dtype: shard_layers(target, mesh, dtype)


def _copy(
    load: Callable[[], tuple[FrozenTarget, PreTrainedTokenizerBase]],
    target: FrozenTarget,
    accelerator: Accelerator,
    say: Callable[[str], None],
) -> Callable[[], FrozenTarget] | None:
    """Return a function that loads a whole copy of the target, or None if the main process has no room for it."""
    if on_main(accelerator, lambda: has_room(target)):
        say("tau is measured on the main process, by a whole copy of the target that is loaded for it")
        return lambda: load()[0]
    say("tau is an estimate by the training step: the main process has no room for a whole copy of the target")
    return None
