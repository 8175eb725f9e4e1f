"""Trim the vocabulary that an MTP head drafts from, and measure what that costs and gains.

    python scripts/token_map.py recipes/mtp-qwen3-8b.yaml target.path=TARGET head.native=true output_dir=runs/token-map

A draft token of a target's own module costs a product with the target's whole output head. Over the most frequent
labels of the recipe's data alone it costs less, and no text changes (FR-Spec, arXiv 2502.14856): the target still
chooses from all tokens. The recipe's head, untrained or that of `head.init_from`, is measured over vocabularies of
several sizes in turns, with the settings of the recipe's final measurement, and the table and its page compare tau,
speed and the bytes that a round reads.

Each vocabulary is saved in `output_dir` as token-map-SIZE.pt: the list of its token ids, as torch.save writes it.
SGLang reads the file with --speculative-token-map beside --speculative-algorithm NEXTN, on one GPU; it ignores the
option for EAGLE-3. vLLM has no such option.
"""

import argparse
import copy
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eval.core.command_line import Parser, exit_status, typed
from heads.core.errors import UserError, expect, first_line
from heads.core.strict_settings import Count

if TYPE_CHECKING:
    from torch import Tensor

    from heads.methods.mtp import Mtp
SHARES = (16, 8, 4, 2)
"""Default sizes: these fractions of the target's vocabulary."""


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser("Trim the vocabulary that an MTP head drafts from, and measure what that costs and gains.")
    add = parser.add_argument
    add("recipe", help="a recipe for a head of kind mtp, whose data are counted")
    add("overrides", nargs="*", metavar="key=value", help="changes of the recipe")
    add(
        "--sizes",
        type=typed(tuple[Count, ...]),
        default=(),
        help="tokens of each vocabulary, such as 8192,32768; default: a 16th to a half of the target's",
    )
    add("--token-map", type=Path, metavar="FILE", help="measure this token map, too")
    return parser.parse_intermixed_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    import torch
    from rich.console import Console

    from eval.data.template_arguments import with_arguments
    from eval.measure.bench_heads import bench_heads
    from eval.pages.run_report import save_and_print
    from heads.core.files import write_bytes
    from heads.parts.vocab import build_vocab
    from train.data.prepare import load_data
    from train.recipe.head_section import make_head
    from train.run.open_run import open_reader, open_run, read_recipe
    from train.steps.accelerate_launch import load_recipe_target

    recipe = read_recipe([options.recipe, *options.overrides])
    kind = recipe.head.kind
    folder = Path(recipe.output_dir)
    expect(kind == "mtp", f"{options.recipe}: head.kind", "mtp, which drafts by the target's output head", kind)
    section = recipe.head.model_copy(update={"draft_vocab_size": None})
    with open_run(recipe) as run:
        target, tokenizer = load_recipe_target(recipe.target, run.accelerator, template=recipe.data.template)
        V = target.vocab_size
        sizes = options.sizes or [V // share for share in SHARES]
        expect(max(sizes) <= V, "--sizes", f"at most {V}, the target's vocabulary", max(sizes))
        lists = {"mtp-whole": torch.arange(V)}
        if options.token_map:
            lists[f"mtp-{options.token_map.stem}"] = read_token_map(options.token_map, V)
        head = make_head(section, target, torch.zeros(V, dtype=torch.int64)).to(target.device, target.dtype).eval()
        reader = open_reader(recipe, target, tokenizer, run)
        mixture, _ = load_data(recipe.data, recipe.train.seed, head, target, reader, run.folder.path)
        counts = mixture.label_counts(V)
        for size in sizes:
            lists[f"mtp-{size}"] = ids = build_vocab(counts, size)
            written = io.BytesIO()
            file = folder / f"token-map-{size}.pt"
            torch.save(ids.tolist(), written)
            write_bytes(file, written.getvalue())
            run.tracker.say(f"{file}: {size:,} tokens, {counts[ids].sum() / counts.sum():.2%} of the data's labels")
        heads = {name: over(head, ids) for name, ids in lists.items()}
        results = bench_heads(target, heads, with_arguments(tokenizer, target.template), recipe.eval.final())
        results.command = ["python", "scripts/token_map.py", *(arguments or sys.argv[1:])]
        save_and_print(results, folder, Console())
    return 0 if results.is_exact else 1


def over(head: "Mtp", ids: "Tensor") -> "Mtp":
    """Return an MTP head with the same modules that drafts the tokens `ids` (Vd,), which are ascending."""
    twin = copy.copy(head)
    twin.config = head.config.model_copy(update={"draft_vocab_size": len(ids)})
    twin._buffers = {"draft_to_target": ids.to(head.draft_to_target.device)}  # the copy would share the head's
    return twin


def read_token_map(file: Path, vocab_size: int) -> "Tensor":
    """Return the token ids (Vd,) of a token map, ascending. UserError for another file, or another vocabulary."""
    import torch

    try:
        ids: Tensor = torch.as_tensor(torch.load(file, weights_only=True), dtype=torch.int64).unique()
        least = int(ids[0])
        most = int(ids[-1])
    except Exception as error:  # any file may be given
        raise UserError(f"{file}: expected a list of token ids that torch.save wrote ({first_line(error)})") from None
    if least < 0 or most >= vocab_size:
        token = least if least < 0 else most
        raise UserError(
            f"{file}: token {token} is none of the target's {vocab_size}: it is the map of another vocabulary; name "
            "one of the target's own"
        )
    return ids


if __name__ == "__main__":
    sys.exit(exit_status(main))
