"""Generate text with a draft head. Answers are streamed, with accepted draft tokens in colour, and tau is shown.

    python eval/chat.py runs/quickstart --prompt 'import os'       # one answer
    python eval/chat.py HEAD_DIR_OR_HUB_ID --system 'Be brief.'    # a conversation; Ctrl-D ends it, Ctrl-C an answer

The text is the same as that of plain decoding, token for token, with any head. A target with a chat template answers,
and reads all earlier turns, as its template renders them now; any other target continues the text. A turn for which
there is no room is refused and not remembered; /reset forgets all turns but --system. If the output is not a terminal,
only the text is written to it. NO_COLOR disables colours. Exit status: 0; 2, with one line, for an error that the user
can fix; 130 for an interrupt outside an answer, or during the answer to --prompt.
"""

import argparse
import io
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from types import FrameType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eval.core.command_line import (
    Parser,
    add_head_options,
    check_depths,
    draft_shapes,
    exit_status,
    print_line,
    typed,
)
from eval.records.measure_settings import SERVED, Trees, served_sampling
from eval.runtime.sampling_params import Sampling, Temperature
from heads.core.errors import UserError
from heads.core.strict_settings import Count, Seed

if TYPE_CHECKING:
    from eval.data.data_files import Message
    from eval.measure.open_models import Opened
    from eval.runtime.engine import Engine, Output, Request
    from heads.core.tree import TreeShape

DEFAULT_TREES = ("chain:5", "chain:3", "chain:1")
MIN_SLOTS = 1024
"""Minimum number of slots of an engine. If a conversation needs more, a new engine with the next power of two is
built."""
DRAFTED, QUIET = "green", "dim"
USAGE = (
    f"Ctrl-D ends, /reset forgets what was said; {DRAFTED} text was drafted and accepted; tau: tokens per pass of the "
    "target"
)
PROBE = 16
"""Tokens of the first answer that are also decoded plainly, for plain decoding's speed."""
INVISIBLE = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""Replacements for control characters, which a model may emit and a terminal would execute."""


class Conversation:
    def __init__(
        self, opened: "Opened", shape: "TreeShape", sampling: Sampling, max_new_tokens: int, console: Console
    ) -> None:
        """`console`: place of answers. If it is no terminal, only their text is written to it."""
        self.head, self.target, self.tokenizer = opened
        self.shape, self.sampling, self.max_new_tokens, self.console = shape, sampling, max_new_tokens, console
        self.messages: list[Message] = []
        self.marks: list[bool] = []
        """True for each token of the last answer that was drafted."""
        self.answers = 0
        self.engine: Engine | None = None
        self.has_compared = False
        """True once an answer was decoded plainly, too."""

    def show(self, text: str, style: str = "") -> None:
        if self.console.is_terminal:
            self.console.print(Text(text.translate(INVISIBLE), style), end="", soft_wrap=True)
        elif style != QUIET:  # the prompt is not part of the output
            self.console.file.write(text)
            self.console.file.flush()

    def answer(self, prompt: str, is_asked_to_stop: Callable[[], bool] = lambda: False) -> "Output":
        """Show the answer to a prompt while it is decoded, then its figures. `is_asked_to_stop` is called after each
        round and ends the answer if it returns True. Raise UserError if the prompt is empty or too long."""
        from eval.data.prompts import answered, render
        from eval.data.rendered_text import unknown_token
        from eval.measure.open_models import prompt_room
        from eval.records.metrics import tau
        from eval.runtime.engine import Request

        has_template = self.tokenizer.chat_template is not None
        messages = [*self.messages, {"role": "user", "content": prompt}] if has_template else [{"content": prompt}]
        text, ids = render(messages, self.tokenizer)
        if fault := unknown_token(ids, self.tokenizer, self.target.vocab_size):
            raise UserError(f"the prompt: {fault}; remove it")
        nodes = self.head.longest(self.shape, 1).nodes
        room = prompt_room(self.target.name, self.target.context_length, self.max_new_tokens, nodes)
        if not 1 <= len(ids) <= room:
            raise UserError(
                f"the conversation with this prompt has {len(ids)} tokens; expected 1 to {room}, which leave room for "
                f"{self.max_new_tokens} new ones; give a shorter prompt, /reset, or start with fewer --max-new-tokens"
            )
        engine = self.engine_for(len(ids) + self.max_new_tokens + nodes)
        sampling = self.sampling.with_seed(self.sampling.seed + self.answers)
        request = Request(ids, self.max_new_tokens, sampling)
        if not has_template:
            self.show(prompt, QUIET)
        output = self.stream(engine, request, is_asked_to_stop)
        self.answers += 1
        if has_template:
            self.messages = [*messages, answered(text, output.written, self.tokenizer)]
        speed = output.decoded / max(engine.timings.decode_seconds, 1e-9)
        length = f"{tau([output]):.2f}" if output.rounds else "-"
        figures = f"{len(output.tokens)} tokens, tau {length}, {speed:,.1f} tokens/s"
        if not self.has_compared and output.decoded > 1 and not is_asked_to_stop():
            self.has_compared = True
            figures += f" ({self.compare(output, engine.timings.round_seconds, ids, sampling)})"
        if self.console.is_terminal:
            self.console.print(figures, style=QUIET, highlight=False)
        else:
            print_line(figures)
        return output

    def stream(self, engine: "Engine", request: "Request", is_asked_to_stop: Callable[[], bool]) -> "Output":
        """Decode, and show each round's tokens, of which all but the last were drafted. How many tokens of the answer's
        last round were drafted is known only from the output."""
        from eval.runtime.request import Detokenizer

        detokenizer = Detokenizer(self.tokenizer, skip_special_tokens=True)
        self.marks = []
        last: list[int] = []

        def add(token: int, drafted: bool) -> None:
            self.marks.append(drafted)
            if token not in self.target.eos_token_ids:
                self.show(detokenizer.push(token), DRAFTED if drafted else "")

        def take(_: int, tokens: list[int]) -> bool:
            if len(self.marks) + len(tokens) == self.max_new_tokens or tokens[-1] in self.target.eos_token_ids:
                last.extend(tokens)
            else:
                for n, token in enumerate(tokens, start=1):
                    add(token, n < len(tokens))
            return is_asked_to_stop()

        (output,) = engine.generate([request], on_tokens=take)
        for token, drafted in zip(last, output.drafted()[len(self.marks) :], strict=True):
            add(token, drafted)
        self.show(f"{detokenizer.flush()}\n")
        return output

    def compare(self, output: "Output", rounds: Sequence[float], ids: Sequence[int], sampling: Sampling) -> str:
        """Return the speed of plain decoding, or why it is not compared: as in the bench, if something else used the
        machine."""
        from eval.measure.machine import busy_cores
        from eval.records.metrics import tau
        from eval.records.speedup_checks import is_believable, is_steady

        if busy_cores(self.target.device) is not None:
            return "plain decoding is not compared: something else uses this machine"
        plain = self.decode_plainly(ids, sampling)
        if is_steady(rounds) and is_believable(output.decoded / sum(rounds) / plain, tau([output])):
            return f"plain decoding {plain:,.1f}"
        return "plain decoding is not compared: the times of steps were uneven"

    def decode_plainly(self, ids: Sequence[int], sampling: Sampling) -> float:
        from eval.runtime.engine import Engine, EngineOptions, Request

        plain = Engine(self.target, None, EngineOptions(max_length=len(ids) + PROBE + 1))
        for tokens in (2, PROBE):  # the first call may compile or capture
            (output,) = plain.generate([Request(ids, tokens, sampling)])
        return output.decoded / plain.timings.decode_seconds

    def engine_for(self, needed: int) -> "Engine":
        from eval.runtime.engine import Engine, EngineOptions

        if self.engine is None or self.engine.options.max_length < needed:
            self.engine = None  # frees its caches before new ones are allocated
            length = max(MIN_SLOTS, 1 << (needed - 1).bit_length())
            options = EngineOptions(shape=self.shape, max_length=min(length, self.target.context_length))
            self.engine = Engine(self.target, self.head, options)
        return self.engine


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns True once Ctrl-C was pressed. A second Ctrl-C raises KeyboardInterrupt."""
    is_interrupted = Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if is_interrupted.is_set():
            raise KeyboardInterrupt
        is_interrupted.set()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield is_interrupted.is_set
    finally:
        signal.signal(signal.SIGINT, before)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser("Generate with a draft head. Answers are streamed, with accepted draft tokens in colour.")
    add_head_options(parser)
    add = parser.add_argument
    add("--prompt", help="answer this prompt and exit; without it, each line of the input is a prompt")
    add("--system", help="system message of the conversation")
    add(
        "--tree",
        dest="trees",
        type=typed(Trees),
        default=DEFAULT_TREES,
        help="draft: chain:5, tree:5x8x24, static:3.2.1 or head; of several, the first that the head can draft; "
        f"default: {','.join(DEFAULT_TREES)}",
    )
    add("--temperature", type=typed(Temperature), help="0, the default, is greedy")
    add("--sampling", choices=[SERVED], help=f"{SERVED}: as servers of the target sample by default")
    add("--seed", type=typed(Seed), default=0, help="seed of the sampling, by default %(default)s; each answer adds 1")
    add("--max-new-tokens", type=typed(Count), default=256, help="most new tokens of each answer; default: %(default)s")
    options = parser.parse_args(arguments)
    check_depths(options.trees if options.trees != DEFAULT_TREES else (), options.max_new_tokens)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    from eval.measure.draft_search import can_draft
    from eval.measure.open_models import open_head

    if options.sampling and options.temperature is not None:
        raise UserError(f"--temperature: --sampling {SERVED} takes it from the target; use one of the two")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    opened = open_head(options)
    sampling = served_sampling(opened.target) if options.sampling else Sampling(temperature=options.temperature or 0.0)
    sampling = sampling.with_seed(options.seed)
    shapes = draft_shapes(options.trees, opened.head)
    fitting = [shape for shape in shapes if can_draft(opened.head, opened.target, shape, "match")]
    shape = (fitting or shapes)[0]  # if none fits, the engine raises the error that says why
    console = Console()
    conversation = Conversation(opened, shape, sampling, options.max_new_tokens, console)
    system: list[Message] = [] if options.system is None else [{"role": "system", "content": options.system}]
    if system and opened.tokenizer.chat_template is None:
        raise UserError(f"--system: {opened.target.name} has no chat template and only continues texts; leave it out")
    conversation.messages = system
    if options.prompt is not None:
        with interruptible() as is_interrupted:
            conversation.answer(options.prompt, is_interrupted)
            return 130 if is_interrupted() else 0
    if console.is_terminal:
        print_line(USAGE)
    while True:
        try:
            prompt = input(f"\n{opened.target.name}> " if sys.stdin.isatty() else "")
        except EOFError:
            return 0
        if prompt.strip() == "/reset":
            conversation.messages = system
        elif prompt.strip():
            try:
                with interruptible() as is_interrupted:
                    conversation.answer(prompt, is_interrupted)
            except UserError as error:  # about this prompt; the next one may be shorter
                print_line(f"error: {error}")


if __name__ == "__main__":
    sys.exit(exit_status(main))
