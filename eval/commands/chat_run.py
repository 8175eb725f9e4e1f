"""Conversation with a target and its draft head, with answers shown while they are decoded."""

import argparse
import io
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from eval.benchmark.auto import can_draft
from eval.benchmark.loading import Opened, open_head, prompt_room
from eval.benchmark.metrics import tau
from eval.benchmark.prompts import render
from eval.benchmark.records import Message
from eval.command import draft_shapes, print_line
from eval.reporting.format import number, plural
from eval.runtime.engine import Engine, EngineOptions, Output, Request
from eval.runtime.request import Detokenizer
from eval.runtime.sampling import Sampling
from heads.errors import UserError
from heads.tree import TreeShape

DEFAULT_TREES = ("chain:5", "chain:3", "chain:1")
"""Default trees: the first one that the head can draft is used."""
LEAST_ROOM = 1024
"""Minimum number of slots of an engine. If a conversation needs more, a new engine with the next power of two is
built."""
DRAFTED, QUIET = "green", "dim"
QUIT, RESET, HELP = "/quit", "/reset", "/help"
USAGE = (
    f"{QUIT} or Ctrl-D ends, {RESET} forgets what was said, {HELP} prints this line; {DRAFTED} text was drafted and "
    "accepted; tau: tokens per pass of the target"
)
PROBE = 16
"""Tokens of the first answer that are also decoded plainly, for plain decoding's speed."""
INVISIBLE = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""Replacements for control characters, which a model may emit and a terminal would execute."""
REFRESH_SECONDS = 0.05


class Screen:
    """Answer in a terminal. Complete lines are printed; the last line and the figures so far are redrawn below."""

    def __init__(self, console: Console) -> None:
        self.console, self.line, self.drawn = console, Text(overflow="fold"), 0.0
        self.live = Live(console=console, auto_refresh=False, transient=True, vertical_overflow="visible")

    def __enter__(self) -> "Screen":
        self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.live.stop()
        self.console.print(self.line, highlight=False, soft_wrap=True)

    def add(self, text: str, style: str = "") -> None:
        """Append some text to the answer."""
        self.line.append(text.translate(INVISIBLE), style)
        *whole, self.line = self.line.split("\n", allow_blank=True)
        self.line.overflow = "fold"
        for line in whole:
            self.console.print(line, highlight=False, soft_wrap=True)

    def draw(self, figures: str) -> None:
        """Redraw the last line and the figures, at most once per REFRESH_SECONDS."""
        if time.monotonic() - self.drawn >= REFRESH_SECONDS:
            self.live.update(Group(self.line, Text(figures, QUIET)), refresh=True)
            self.drawn = time.monotonic()


class Pipe:
    """Answer as plain text on standard output."""

    def __enter__(self) -> "Pipe":
        self.last = "\n"
        return self

    def __exit__(self, *_: object) -> None:
        if self.last != "\n":
            print(flush=True)

    def add(self, text: str, style: str = "") -> None:
        """Append some text to the answer. A prompt, which has the style QUIET, is not written."""
        if text and style != QUIET:
            sys.stdout.write(text)
            sys.stdout.flush()
            self.last = text[-1]

    def draw(self, figures: str) -> None:
        """Do nothing: figures are printed at the end."""


class Stream:
    """Stream of an answer's tokens to the screen, each marked as drafted or as the target's own."""

    def __init__(self, screen: Screen | Pipe, detokenizer: Detokenizer) -> None:
        self.screen, self.detokenizer = screen, detokenizer
        self.flags: list[bool] = []
        """True for each token shown that was drafted."""
        self.held: list[int] = []
        """Tokens of the last round. Only the final output shows how many of them were drafted."""
        self.rounds = -1
        """Number of target passes so far, without the prompt's pass."""

    def take(self, tokens: Sequence[int], *, is_last: bool) -> None:
        """Show the tokens of a round. The last one is the target's own; those before it were drafted. The tokens of the
        answer's last round are kept for `end`."""
        self.rounds += 1
        if is_last:
            self.held = list(tokens)
            return
        for n, token in enumerate(tokens, start=1):
            self.show(token, n < len(tokens))
        self.screen.draw(figures_line(len(self.flags), (len(self.flags) - 1) / self.rounds if self.rounds else None))

    def show(self, token: int, drafted: bool) -> None:
        """Show a token."""
        self.flags.append(drafted)
        self.screen.add(self.detokenizer.push(token), DRAFTED if drafted else "")

    def end(self, output: Output) -> None:
        """Show the tokens of the last round and the remaining text."""
        for token, drafted in zip(self.held, output.drafted()[len(self.flags) :], strict=True):
            self.show(token, drafted)
        self.screen.add(self.detokenizer.flush())


class Conversation:
    """Conversation with a target and a head, with all messages so far."""

    def __init__(
        self, opened: Opened, shape: TreeShape, sampling: Sampling, max_new_tokens: int, console: Console | None
    ) -> None:
        """`console`: terminal for answers. If None, answers are written to standard output as plain text."""
        self.head, self.target, self.tokenizer = opened
        self.shape, self.sampling, self.max_new_tokens, self.console = shape, sampling, max_new_tokens, console
        self.messages: list[Message] = []
        self.marks: list[bool] = []
        """True for each token of the last answer that was drafted."""
        self.answers = 0
        self.engine: Engine | None = None
        self.plain_speed: float | None = None
        """Tokens/s of plain decoding; None before the first answer."""

    def answer(self, prompt: str, is_asked_to_stop: Callable[[], bool] = lambda: False) -> Output:
        """Show the answer to a prompt while it is decoded, then its figures. `is_asked_to_stop` is called after each
        round and ends the answer if it returns True. Raise UserError if the prompt is empty or too long."""
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise UserError("the prompt: expected UTF-8 text, got bytes of another encoding; convert it") from None
        talks = self.tokenizer.chat_template is not None
        messages = [*self.messages, {"role": "user", "content": prompt}] if talks else [{"content": prompt}]
        _, ids = render(messages, self.tokenizer)
        room = prompt_room(self.target, self.max_new_tokens, self.shape.nodes)
        if not 1 <= len(ids) <= room:
            raise UserError(
                f"the prompt, with what was said before, has {len(ids)} tokens; expected 1 to {room}, which leave room "
                f"for {self.max_new_tokens} new ones; begin anew, or with another --max-new-tokens"
            )
        engine = self.engine_for(len(ids) + self.max_new_tokens + self.shape.nodes)
        sampling = Sampling(self.sampling.temperature, seed=self.sampling.seed + self.answers)
        with Screen(self.console) if self.console is not None else Pipe() as screen:
            if not talks:
                screen.add(prompt, QUIET)
            stream = Stream(screen, Detokenizer(self.tokenizer, skip_special_tokens=True))

            def take(_: int, tokens: list[int]) -> bool:
                is_full = len(stream.flags) + len(tokens) == self.max_new_tokens
                stream.take(tokens, is_last=is_full or tokens[-1] in self.target.eos_token_ids)
                return is_asked_to_stop()

            (output,) = engine.generate([Request(ids, self.max_new_tokens, sampling)], on_tokens=take)
            stream.end(output)
        self.answers, self.marks = self.answers + 1, stream.flags
        if talks:
            text = str(self.tokenizer.decode(output.tokens, skip_special_tokens=True))
            self.messages = [*messages, {"role": "assistant", "content": text}]
        speed = output.decoded / max(engine.timings.decode_seconds, 1e-9)
        if self.plain_speed is None and output.decoded > 1 and not is_asked_to_stop():
            self.plain_speed = self.decode_plainly(ids, sampling)
        beside = "" if self.plain_speed is None else f" (plain decoding {number(self.plain_speed, 1)})"
        figures = f"{figures_line(len(output.tokens), tau([output]))}, {number(speed, 1)} tokens/s{beside}"
        if self.console is None:
            print_line(figures)
        else:
            self.console.print(figures, style=QUIET, highlight=False)
        return output

    def decode_plainly(self, ids: Sequence[int], sampling: Sampling) -> float | None:
        """Return the tokens/s of plain decoding after a prompt, or None if the answer ends at once."""
        plain = Engine(self.target, None, EngineOptions(max_length=len(ids) + PROBE + 1))
        for tokens in (2, PROBE):  # the first call may compile or capture
            (output,) = plain.generate([Request(ids, tokens, sampling)])
        return output.decoded / plain.timings.decode_seconds if output.decoded > 1 else None

    def engine_for(self, needed: int) -> Engine:
        """Return an engine with room for `needed` tokens."""
        if self.engine is None or self.engine.options.max_length < needed:
            self.engine = None  # frees its caches before new ones are allocated
            length = max(LEAST_ROOM, 1 << (needed - 1).bit_length())
            options = EngineOptions(shape=self.shape, max_length=min(length, self.target.context_length))
            self.engine = Engine(self.target, self.head, options)
        return self.engine


def figures_line(tokens: int, tau: float | None) -> str:
    """Return the figures of an answer, such as `128 tokens, tau 2.84`."""
    return f"{plural(tokens, 'token')}, tau {number(tau)}"


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns True once Ctrl-C was pressed. A second Ctrl-C raises KeyboardInterrupt."""
    asked = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    before: Any = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)


def chat(options: argparse.Namespace) -> int:
    """Load the head and the target that the options name, and answer prompts. Return the exit status."""
    if options.prompt is None:
        open_input()
    opened = open_head(options)
    shapes = draft_shapes([options.tree] if options.tree else DEFAULT_TREES, opened.head)
    fitting = [shape for shape in shapes if can_draft(opened.head, opened.target, shape, "match")]
    shape = (fitting or shapes)[0]  # if none fits, the engine raises the error that says why
    console = Console()
    shown = console if console.is_interactive else None
    sampling = Sampling(options.temperature, seed=options.seed)
    conversation = Conversation(opened, shape, sampling, options.max_new_tokens, shown)
    if options.prompt is not None:
        with interruptible() as is_interrupted:
            conversation.answer(options.prompt, is_interrupted)
            return 130 if is_interrupted() else 0
    if shown is not None:
        print_line(USAGE)
    while (prompt := read_prompt(opened.target.name)) is not None and prompt.strip() != QUIT:
        if not prompt.strip():
            continue
        if prompt.strip() == HELP:
            print_line(USAGE)
            continue
        if prompt.strip() == RESET:
            conversation.messages.clear()
            continue
        try:
            with interruptible() as is_interrupted:
                conversation.answer(prompt, is_interrupted)
        except UserError as error:  # about this prompt; the next one may be shorter
            print_line(f"error: {error}")
            conversation.messages.clear()
    return 0


def open_input() -> None:
    """Accept bytes on standard input that are not UTF-8, so that only their prompt is refused. Raise UserError if
    standard input is closed."""
    if sys.stdin is None:
        raise UserError("standard input is closed, and prompts are read from it; name one with --prompt")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")


def read_prompt(name: str) -> str | None:
    """Return a line from the user, or None at the end of the input."""
    try:
        return input(f"\n{name}> " if sys.stdin.isatty() else "")
    except EOFError:
        return None
