"""Heads that other projects published in their own forms, and heads to start training from.

The config.json of draftsmith's heads names their kind and target. Any other head is read for a target that the user
names. The first format that recognises the folder converts it (`heads.formats.engine_folder.Format.read`). After that
it is a head like any other.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from heads.blocks.backbone import DraftBlockHead
from heads.core.contract import Origin
from heads.core.errors import UserError, first_line, shown
from heads.core.files import file_hash
from heads.foreign.published_files import Source, foreign_config, open_source
from heads.methods.method_settings import METHODS
from heads.parts.initial_weights import begin
from heads.registry import HEADS, kind_of
from heads.saved import check_fits, find_head, load_head, restore_head
from heads.targets.frozen_target import FrozenTarget

UNREAD = {
    "p-?eagle": "P-EAGLE",
    "eagle3.*deepseek|deepseek.*eagle3": "an EAGLE-3 with DeepSeek's latent attention",
    "gemma4(eagle3|dspark)": "a head with Gemma-4's layers",
    "eagle(?!3)": "EAGLE-1 or EAGLE-2",
    "^mtp$": "a folder of speculators' modules (its stitch_mtp puts them into a checkpoint)",
}
"""Kinds of heads that are known and not read, by a pattern of the names in config.json."""


def check_readable(source: Source) -> None:
    """Raise UserError for a head of a kind in `UNREAD`."""
    fields = source.config
    files = source.files
    classes = fields.get("architectures") or []
    nested = fields.get("dflash_config") or {}
    names = [*classes, fields.get("speculators_model_type"), nested.get("projector_type")]
    if "mask_hidden" in files:
        names.append("P-EAGLE")
    if "fc.weight" in files and classes == ["LlamaForCausalLM"] and "draft_vocab_size" not in fields:
        names.append("EAGLE")
    for pattern, what in UNREAD.items():
        for name in names:
            if re.search(pattern, str(name), re.IGNORECASE):
                raise UserError(f"{source.path}: {shown(name)}: {what} is not read here")


def is_published(path: str) -> bool:
    """Return True for a head in another project's form: a folder, a Hub id, or either with the name of a pickle."""
    return foreign_config(path) is not None


def read_published(path: str, target: FrozenTarget) -> Any:
    """Return a head in another project's form. Raises UserError if it is damaged, made for another target, or in no
    known form."""
    source = open_source(path, foreign_config(path) or {})
    try:
        check_readable(source)
        readings = ((kind, method.format.read(source, target)) for kind, method in HEADS.items())
        kind, reading = next((pair for pair in readings if pair[1] is not None), ("", None))
    except UserError:
        raise
    except Exception as error:  # types of values that no head's config.json has
        raise UserError(f"{path}: config.json describes no head ({first_line(error)})") from error
    if reading is None:
        raise UserError(f"{path}: neither a head of draftsmith's nor a published one of a kind of {', '.join(HEADS)}")
    head = restore_head(kind, reading.config, reading.weights, path)
    used = {file for name, file in source.files.items() if name in reading.weights} or set(source.files.values())
    hashes = {file.name: file_hash(file) for file in sorted(used)}
    head.origin = Origin(reading.form, hashes, reading.differs)
    return head


def open_any(path: str, target: FrozenTarget) -> Any:
    """Return the head at a path or Hub id, draftsmith's or published. Raises UserError if it was made for another
    target."""
    if is_published(path):
        return read_published(path, target)
    folder = find_head(path)
    check_fits(folder, target)
    return load_head(folder)


def start_from(path: str, kind: str, settings: Mapping[str, object], target: FrozenTarget, token_counts: Tensor) -> Any:
    """Return a head of a recipe's `kind` with the shape, layers and weights of the head at `path`.

    settings: those in the recipe. Settings that affect only the training (`HeadKind.training`) are taken from the
    recipe. Any other that differs from the head at `path` raises UserError with its key.

    Heads that draft a block may start from one of another kind, which drafts as many tokens. They take the tensors that
    have the same names; the others are those of a new head, whose initial weights depend on the labels in the data,
    token_counts (V,).
    """
    source = open_any(path, target)
    method = HEADS[kind]
    was = kind_of(source)
    shape = source.config.model_dump(mode="json")
    both_draft_blocks = isinstance(source, DraftBlockHead) and issubclass(method.head, DraftBlockHead)
    if was != kind and not both_draft_blocks:
        raise UserError(f"head.kind: {path} holds a head of kind {was}, the recipe says {kind}")
    if isinstance(source, DraftBlockHead) and source.draft_to_target is not None:
        raise UserError(
            f"head.init_from: {path} drafts {len(source.draft_to_target)} of the target's {target.vocab_size} tokens: "
            "such heads are measured, not trained; start from one that drafts all"
        )
    free = method.training
    if was != kind:
        known = method.head.Config.model_fields
        if shape.get("causal") and "causal" not in known:
            raise UserError(f"head.init_from: {path} is causal, which a {kind} is not; start from one that is not")
        free |= {"initial_weights"}
        shape = {name: value for name, value in shape.items() if name in known}
        shape["block_size"] = source.depth + method.head.Config.spare_rows
        if not shape.get("conv_kernel_size"):  # without convolutions there is nothing to be like
            shape = {name: value for name, value in shape.items() if not name.startswith("conv_")}
    chosen = {name: value for name, value in settings.items() if value is not None}
    left_out = [
        name for name in sorted(method.optional) if was == kind and shape.get(name) and not chosen.get(name, True)
    ]
    for name, value in chosen.items():
        if name in shape and name not in free and shape[name] != value and name not in left_out:
            has = f"has {shape[name]}"
            if was != kind and name == "block_size":
                has = f"drafts {source.depth} tokens, for which a {kind} has {shape[name]} rows"
            raise UserError(f"head.{name}: the head in {path} {has}, got {value}; leave it out")
    fields = METHODS[kind].settings.model_fields
    defaults = {name: field.default for name, field in fields.items() if field.default is not None}
    config = shape | {name: value for name, value in {**defaults, **chosen}.items() if name in free}
    if was == kind:
        head = method.head.from_checkpoint(config, source.to_checkpoint())
        if left_out:
            head = head.without(left_out, target, token_counts)
            head.started = f"{path}, without {' and '.join(left_out)}"
        return head
    head = method.head(method.head.Config.from_plain(config | chosen))
    begin(head, target, token_counts, closely=True)
    ours = head.state_dict()
    theirs = source.state_dict()
    taken = {name: theirs[name] for name in ours.keys() & theirs.keys()}
    head.load_state_dict(ours | taken)
    head.started = (
        f"{path} holds a {was}; taken: {_modules(taken)}; new: {_modules(ours.keys() - taken.keys())}; "
        f"left out: {_modules(theirs.keys() - taken.keys())}"
    )
    return head


def _modules(tensors: Iterable[str]) -> str:
    """Return the modules that hold some tensors, with one name for all layers."""
    parts = (name.split(".") for name in tensors)
    names = {f"layers.*.{part[2]}" if part[0] == "layers" else part[0] for part in parts}
    return ", ".join(sorted(names)) or "none"
