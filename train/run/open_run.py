"""An open run: its folder, its processes, its tracker, and the signals that may stop it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from accelerate import Accelerator
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedTokenizerBase

from eval.core.command_line import print_line
from eval.data.chat_template import ChatTemplate
from heads.core.errors import UserError
from heads.targets.frozen_target import FrozenTarget, Place
from heads.targets.layer_placement import drop_layers, shard_layers
from heads.targets.target_files import load_config, load_end_ids, load_tokenizer
from train.core.interrupts import Interrupts
from train.core.processes import die_with_launcher, on_main
from train.core.strict_yaml import suggest
from train.data.corpus import Reader
from train.data.sources import ChatSource
from train.features.cached import CachedFeatures
from train.features.feature_settings import AnyFeatures, CacheFeatures, ProcessFeatures, ShardedFeatures
from train.features.feature_source import FeatureSource, has_room
from train.features.vllm import ServedFeatures
from train.recipe.recipe import Recipe, Target, load_recipe
from train.run.checkpoints import begun_in
from train.run.run_folder import RunFolder
from train.run.tracking import Tracker
from train.steps.accelerate_launch import describe_launch, load_recipe_target, make_accelerator
from train.steps.stepper import rows_per_step


@dataclass(frozen=True)
class Run:
    """The parts of a run that all its code may use."""

    folder: RunFolder
    accelerator: Accelerator
    tracker: Tracker
    interrupts: Interrupts


@contextmanager
def open_run(recipe: Recipe) -> Iterator[Run]:
    """Open a recipe's run for a `with` block: lock its folder, and create the Accelerator and the tracker."""
    die_with_launcher()
    with Interrupts() as interrupts:
        folder = RunFolder(Path(recipe.output_dir))
        accelerator = make_accelerator(recipe.train, begun_in(folder.checkpoints), recipe.tracking, folder.path)
        tracker = Tracker(accelerator, folder, recipe.tracking)
        tracker.say(describe_launch(accelerator))
        try:
            on_main(accelerator, folder.lock)
            yield Run(folder, accelerator, tracker, interrupts)
        finally:
            tracker.finish(code=1)  # has no effect after a run that succeeded
            folder.unlock()


def read_recipe(arguments: Sequence[str]) -> Recipe:
    """Read the recipe of a command line, for its target's chat template."""
    path, *overrides = arguments
    return fit_template(load_recipe(path, overrides), overrides)


def fit_template(recipe: Recipe, overrides: Iterable[str]) -> Recipe:
    """Return a recipe without the arguments that its target's chat template does not read, since a recipe may be used
    for another target, and print which these are. UserError if one of them is in the command line's overrides."""
    data, target = recipe.data, recipe.target
    overridden = {override.removeprefix("--").partition("=")[0] for override in overrides}
    chats = [source for source in data.sources if isinstance(source, ChatSource)]
    if not data.template or not chats:
        return recipe
    try:
        tokenizer = tokenizer_of(target)
        rendering = ChatTemplate(tokenizer)
    except UserError:
        return recipe  # a plan needs no tokenizer, and a run is refused when it loads its target
    if rendering.tokenizer.chat_template is None:
        return recipe
    read = [source.template(rendering).arguments_read() for source in chats]
    known = sorted({name for names in read for name in names or ()})
    unread = [name for name in data.template if name not in known and None not in read]
    for name in unread:
        if {"data", "data.template", f"data.template.{name}"}.intersection(overridden):
            raise UserError(
                f"data.template.{name}: the chat template reads no such argument"
                f"{suggest(name, known) if known else ', and no other'}; leave it out"
            )
    if unread:
        names = ", ".join(unread)
        print_line(f"data.template: left out {names}, which the chat template of {target.path} does not read")
    template = {name: value for name, value in data.template.items() if name not in unread}
    return recipe.model_copy(update={"data": data.model_copy(update={"template": template})})


OF_TOKENIZER = {"trust_remote_code", "gguf_file", "adapter", "fix_mistral_regex"}


def tokenizer_of(target: Target) -> PreTrainedTokenizerBase:
    return load_tokenizer(target.path, **target.model_dump(include=OF_TOKENIZER))


def rendering_of(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, vocab_size: int | None = None) -> ChatTemplate:
    """Return the chat template of a recipe's target, with the recipe's arguments and all tokens that end an answer.
    `vocab_size`: that of the loaded target; None: as its config says, which an adapter may change."""
    target, opened = recipe.target, recipe.target.model_dump(include={"trust_remote_code", "gguf_file"})
    ends = load_end_ids(target.path, tokenizer, **opened)
    if vocab_size is None and target.adapter is None:
        vocab_size = load_config(target.path, **opened).get_text_config().vocab_size
    return ChatTemplate(tokenizer, arguments=recipe.data.template, end_ids=ends, vocab_size=vocab_size)


def open_reader(recipe: Recipe, target: FrozenTarget, tokenizer: PreTrainedTokenizerBase, run: Run) -> Reader:
    """Return the reader of a run's data sources. A chat template that prints the date gets the day on which the run
    began."""
    rendering = rendering_of(recipe, tokenizer, target.vocab_size)
    chats = [source for source in recipe.data.sources if isinstance(source, ChatSource)]
    if any(source.template(rendering).has_date for source in chats):
        rendering = replace(rendering, day=on_main(run.accelerator, run.folder.first_day))
    return Reader(rendering, run.accelerator, run.tracker.say)


def open_source(
    settings: AnyFeatures,
    recipe: Recipe,
    accelerator: Accelerator,
    say: Callable[[str], None],
) -> tuple[FeatureSource, PreTrainedTokenizerBase]:
    """Return the source of features for `settings`, with the target of a recipe, and the target's tokenizer. Called by
    every process."""
    load = partial(load_recipe_target, recipe.target, accelerator, template=recipe.data.template)
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


ALONE = "features.kind: sharded needs several processes; launch them, or use features.kind=process"


def sharding(accelerator: Accelerator) -> Place:
    """Return the placement that shards the target's layers over all processes. Called by every process."""
    if accelerator.num_processes == 1:
        raise UserError(ALONE)
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
