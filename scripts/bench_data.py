"""Speed and memory of tokenising conversations, and of a second start; speed of a server's features.

    python scripts/bench_data.py --conversations 2000
    python scripts/bench_data.py --rows 16

Conversations of four answers, cut from Python's standard library, in the quickstart target's tokens. Each start is a
process of its own: the first tokenises, the second maps what it wrote. Memory is the process's own (RssAnon), without
the pages of mapped files, above what it held before it read anything: the peak, and at the end.

With `--rows`, rows of the same target's features: by its pass in this process, and by the same pass in a stand-in for a
vLLM server, which writes its files. The two take turns, with OMP_NUM_THREADS threads each.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from eval.command import Parser, count, exit_status

TURNS = 4
TARGET = "recipes/quickstart/target"
START = """
import sys, threading, time
from pathlib import Path
from accelerate import Accelerator
from heads.target.frozen import load_tokenizer
from train.data.loading import read_source
from train.data.packing import Mixture, Pool
from train.data.reader import Reader
from train.data.sources import ChatSource
from train.data.target_text import CHAT_TEMPLATE
from train.data.templates import ChatTemplate

def own():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024

peak = 0
def watch():
    global peak
    while True:
        peak = max(peak, own())
        time.sleep(0.05)

tokenizer = load_tokenizer("recipes/quickstart/target")
tokenizer.chat_template = CHAT_TEMPLATE
reader = Reader(ChatTemplate(tokenizer), Accelerator(cpu=True), lambda _: None)
before, seconds, cpu = own(), time.perf_counter(), time.process_time()
threading.Thread(target=watch, daemon=True).start()
corpus = read_source(ChatSource(kind="chat", path=sys.argv[1]), "source", reader)
mixture = Mixture([Pool(corpus, 2048)], [1.0], 0)
mixture.digest()
mixture.rows(range(8))
seconds, cpu = time.perf_counter() - seconds, time.process_time() - cpu
print(len(corpus), len(corpus.tokens), seconds, cpu, max(peak, own()) - before, own() - before)
"""


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = Parser("Measure speed and memory of tokenising conversations.")
    parser.add_argument("--conversations", type=count, default=2000, help="to tokenise")
    parser.add_argument("--tokens", type=count, default=2000, help="of a conversation, roughly")
    parser.add_argument("--rows", type=count, help="measure features, of this many rows in each of 8 turns")
    parser.add_argument("--row-tokens", type=count, default=256, help="of a row of features")
    return parser.parse_args(arguments)


def write_conversations(path: Path, conversations: int, tokens: int) -> None:
    """Conversations of about `tokens` tokens each."""
    from eval.benchmark.python_source import read_split

    text = "".join(text for _, text in read_split(held_out=False))
    piece = 3 * tokens // (2 * TURNS)  # characters: a token of this text has three
    with path.open("w", encoding="utf-8") as file:
        for number in range(conversations):
            start = number * 7919 % (len(text) - 2 * TURNS * piece)
            cut = [text[start + n * piece : start + (n + 1) * piece] for n in range(2 * TURNS)]
            turns = [{"role": ("user", "assistant")[n % 2], "content": part} for n, part in enumerate(cut)]
            file.write(json.dumps({"messages": turns}) + "\n")


def compare_features(num_rows: int, T: int) -> None:
    """Print the rows a second of a server beside those of this process."""
    import torch
    from accelerate import Accelerator

    from heads.target.frozen import load_target
    from heads.target.placement import drop_layers
    from train.data.packing import Rows
    from train.features.base import FeatureSource
    from train.features.served import ServedFeatures
    from train.features.settings import VllmFeatures

    whole, lean = load_target(TARGET), load_target(TARGET, place=drop_layers)
    n = whole.num_layers
    aux_layer_ids = (2, n // 2, n - 3)

    def seconds(source: FeatureSource) -> float:
        every, ahead = torch.randint(whole.vocab_size, (num_rows, 1, T)), 0
        rows = [Rows(row, row >= 0, torch.arange(T)[None], torch.zeros_like(row)) for row in every]
        started = time.perf_counter()
        for at, row in enumerate(rows):
            for coming in rows[ahead : at + source.steps_ahead]:
                source.expect(coming)
            ahead = max(ahead, at + source.steps_ahead)
            source.target.packed_features(row.tokens, row.positions, row.documents, aux_layer_ids)
        return time.perf_counter() - started

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        command = [sys.executable, "-m", "tests.hidden_states_server", TARGET, folder, *map(str, (*aux_layer_ids, n))]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            try:
                settings = VllmFeatures(kind="vllm", url=server.stdout.readline().strip(), in_flight=8)
                served = ServedFeatures(lean, settings, 1, Accelerator(cpu=True))
                served.open_server(aux_layer_ids)
                sources = {"process": FeatureSource(whole), "server": served}
                took = [{name: seconds(source) for name, source in sources.items()} for _ in range(1 + 8)][1:]
                served.close()
            finally:
                server.kill()
    best = {name: num_rows / min(turn[name] for turn in took) for name in sources}
    ratios = sorted(turn["process"] / turn["server"] for turn in took)
    print(
        f"{torch.get_num_threads()} threads, rows of {T} tokens: process {best['process']:.1f} rows/s, server "
        f"{best['server']:.1f} rows/s, ratio {best['server'] / best['process']:.2f}; in each turn "
        f"{', '.join(f'{ratio:.2f}' for ratio in ratios)}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    if options.rows is not None:
        compare_features(options.rows, options.row_tokens)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "chats.jsonl"
        write_conversations(path, options.conversations, options.tokens)
        environment = {**os.environ, "DRAFTSMITH_DATA_CACHE": str(Path(folder) / "cache")}
        for start in ("first", "second"):
            command = [sys.executable, "-c", START, str(path)]
            done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
            documents, tokens, seconds, cpu, peak, memory = map(float, done.stdout.split())
            print(
                f"{start} start: {documents:.0f} documents, {tokens:.0f} tokens, {seconds:.2f} s, "
                f"{tokens / cpu:.0f} tokens a CPU second, {peak / tokens:.2f} bytes a token at the peak, "
                f"{memory / tokens:.2f} at the end"
            )
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
