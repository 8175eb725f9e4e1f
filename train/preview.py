"""A preview of a recipe's data, without training: python -m train.preview RECIPE.yaml [key.sub=value ...].

Prints the first documents of each source, with the labels between brackets, and counts: documents, tokens, labels,
rows, and the records left out by reason. A run of the recipe reuses the tokenised data.
"""

import sys
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

from eval.measure.command import asks_usage, exit_status
from train.recipe import Recipe
from train.usage import keys_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from train.data.cache import Document

USAGE = "usage: python -m train.preview RECIPE.yaml [key.sub=value ...]"
SHOWN = 2
"""Documents of each source that are printed."""
OPEN, CLOSE = "⟦", "⟧"


def main() -> int:
    if asks_usage(USAGE, sys.argv[1:], keys=lambda: keys_of(Recipe)):
        return 0
    return preview(sys.argv[1:])


def preview(arguments: Sequence[str]) -> int:
    """Print the data of a recipe with its overrides, and return the exit status 0."""
    from accelerate import Accelerator

    from heads.targets.load import load_tokenizer
    from train.data.answers import find_prompts
    from train.data.cache import Reader
    from train.data.packing import Pool
    from train.data.sources import read_source
    from train.opening import read_recipe, rendering_of

    recipe = read_recipe(arguments)
    data = recipe.data
    target = recipe.target
    tokenizer = load_tokenizer(target.path, trust_remote_code=target.trust_remote_code, gguf_file=target.gguf_file)
    reader = Reader(rendering_of(recipe, tokenizer), Accelerator(cpu=True), print)
    for number, source in enumerate(data.sources):
        name = f"data.sources.{number}"
        corpus = read_source(source, name, reader)
        for document in islice(corpus, SHOWN):
            print(f"--- {name}, {len(document.ids)} tokens\n{marked(tokenizer, document)}")
        print(f"--- {Pool(corpus, data.context_length).describe(name)}")
        for reason, count in sorted(corpus.tally.skipped.items(), key=lambda pair: -pair[1]):
            print(f"    {count} of {corpus.tally.records} records left out: {reason}")
    if data.regenerate is not None:
        share = "" if data.regenerate.share == 1 else f" for {data.regenerate.share:g} of the rows"
        print(f"--- data.regenerate: before training, the target answers these prompts itself{share}")
        find_prompts(data, recipe.train.seed, data.regenerate, "data.regenerate", reader, quiet=True)
    return 0


def marked(tokenizer: "PreTrainedTokenizerBase", document: "Document") -> str:
    ids, labels = document.ids.tolist(), document.labels.tolist()
    bounds = [n for n in range(1, len(ids)) if labels[n] != labels[n - 1]]
    runs = zip([0, *bounds], [*bounds, len(ids)], strict=True)
    texts = [(str(tokenizer.decode(ids[start:end])), labels[start]) for start, end in runs]
    return "".join(f"{OPEN}{text}{CLOSE}" if label else text for text, label in texts)


if __name__ == "__main__":
    sys.exit(exit_status(main))
