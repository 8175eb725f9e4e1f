"""Growth of a small target and its heads into the shape of a big model, with a check before they are saved."""

import argparse
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from eval.benchmark.loading import load_pair
from heads.checkpoint import check_fits, find_head, load_head, read_config, save_head, target_record
from heads.errors import UserError
from heads.files import check_folder, whole_folder
from heads.target.frozen import FrozenTarget
from scripts.grown.heads import HeadSize, grow_head
from scripts.grown.shapes import SHAPES, ModelShape
from scripts.grown.target import Growth, grow_llama, shape_of

CHECKED_TOKENS = 64
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}


def grow(options: argparse.Namespace) -> int:
    """Grow, check and save the target and its heads. Return the exit status."""
    check_folder(options.out.parent, "OUT")
    if options.out.is_file() or (options.out.is_dir() and any(options.out.iterdir())):
        raise UserError(f"OUT {options.out}: is there already; name another, or delete it first")
    cpu, trusted = torch.device("cpu"), options.trust_remote_code
    target, tokenizer = load_pair(options.target, dtype=options.dtype, device=cpu, trust_remote_code=trusted)
    sizes = {field.name: getattr(options, field.name) for field in fields(ModelShape)}
    given = {name: size for name, size in sizes.items() if size is not None}
    small = shape_of(target.config)
    shape = replace(SHAPES[options.shape] if options.shape else small, **given)
    folders = {Path(path).name: find_head(path) for path in options.heads}
    if len(folders) < len(options.heads):
        raise UserError("--heads: each is saved under its own name, and two have the same; rename one")
    heads = {name: open_head(folder, target) for name, folder in folders.items()}
    growth = Growth(small, shape, target.config.rms_norm_eps)
    size = HeadSize(options.head_intermediate_size, options.draft_vocab_size)
    grown_heads = {name: grow_head(head, growth, size) for name, head in heads.items()}  # before anything is saved
    model = grow_llama(target.model, shape)
    model.config.grown_from = target.name
    grown = FrozenTarget(model, str(options.out))
    error, agreement = difference(target, grown)
    limit = TOLERANCE.get(target.dtype, 0.1)
    print(f"logits differ by {error:.1e} (relative), greedy choices agree {agreement:.1%}, {CHECKED_TOKENS} tokens")
    if not error < limit:
        raise UserError(f"the grown model is not the small one: logits differ by {error:.1e}, at most {limit} expected")
    with whole_folder(options.out) as path:
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
    record, facts = target_record(grown), {"grown_from": target.name}
    for name, head in grown_heads.items():
        save_head(head, options.out / name / "head", target=record, provenance=facts)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{options.out}: {parameters / 1e9:.2f}B parameters, heads: {', '.join(heads) or 'none'}")
    return 0


def open_head(folder: Path, target: FrozenTarget) -> Any:
    """Load a head of the small target. Raise UserError if it was trained for another target or with an adapter."""
    check_fits(folder, target)
    if read_config(folder)["target"].get("adapter"):
        raise UserError(
            f"{folder}: was trained with an adapter on its target, which cannot be grown; name another head"
        )
    return load_head(folder, dtype=target.dtype)


@torch.no_grad()
def difference(small: FrozenTarget, large: FrozenTarget) -> tuple[float, float]:
    """Return the relative distance between the logits of two models on some tokens, and the share of tokens on which
    their greedy choices agree."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(small.vocab_size, (1, CHECKED_TOKENS), generator=draw)
    positions = torch.arange(CHECKED_TOKENS)[None]
    both = []
    for target in (small, large):
        hidden = target.packed_features(tokens, positions, torch.zeros_like(positions), ()).hidden
        both.append(target.shared.lm_head(hidden))
    agreement = (both[0].argmax(-1) == both[1].argmax(-1)).double().mean()  # over the grown vocabulary
    ours = both[1][..., : small.vocab_size]
    return float((ours - both[0]).norm() / both[0].norm()), float(agreement)
