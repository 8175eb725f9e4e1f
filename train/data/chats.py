"""Conversations as token ids with a label mask, from the text that the chat template renders, and as prompts.

A label is a token that the target itself would write after the prompt as its server builds it: the chat template with
`add_generation_prompt` and the recipe's template arguments. So nothing is a label that the template puts in place of a
reasoning which the record does not hold, and nothing after the token that ends the answer: the first of the target's
end ids, or, where no token ends an answer, the beginning of the next turn. Answers of weight 0 are context.

The code does not guess what the template adds around an answer. The prompt of turn i is the rendered text of the turns
before it, with the opening of an answer. The answer is what the rendered text of the turns up to i adds to the prompt.
If each of these texts is a prefix of the next, only the last one is tokenised, and the offsets of its tokens locate the
answers. If a template rewrites earlier turns, for example by dropping the reasoning of past answers, every answer gets
its own document, as the model sees it when it answers. A template that drops the reasoning of every answer, though its
prompt opens one (DeepSeek-R1), cannot render what the target writes: there the reasoning follows the prompt, is closed,
and the answer follows as the template renders it.

Offsets give correct labels only if a token begins at each boundary of a turn, so that no merge crosses one. Every other
conversation is tokenised turn by turn.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from eval.data.answer_frame import OPENS, REASONING_END, THOUGHTS, shared_start
from eval.data.chat_template import ChatTemplate
from eval.data.conversation_forms import FINISH, REASONING
from eval.data.data_files import Message, RecordError
from eval.data.rendered_text import LEFT_OUT, check_rendered, without_second_bos
from eval.data.template_traits import blank, common_prefix
from train.data.corpus import Document

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerBase

NO_TOOLS = "records have tools, which the chat template does not render"
RENDERED = "texts are rendered by the chat template already: their labels are the assistant's answers"
CUT = ("length", "max_tokens")
"""Reasons, by servers' names, for which an answer ended at a limit: no end token follows it."""
TAGGED = "answers have reasoning in tags in their text, where the chat template knows none: the tags are labels"
REWRITTEN = "rewritten by the chat template"
"""Reason of a record in which the labels of an answer cannot be found."""
BESIDE_CALL = "answers are no labels: they have text beside a tool call, which the chat template does not keep"
KNOWN = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "weight", FINISH, *REASONING})
"""Keys of a turn whose meaning is known."""
WEIGHT_LIKE = re.compile("weight|train|loss|mask|learn|supervis|ignore")
"""Matches other names that turns may have for their weight."""


class Rendered(NamedTuple):
    """The text of a document of a conversation."""

    text: str
    answers: list[tuple[int, int]]
    """Where the labels of each answer begin and end in the text."""


def encode_texts(template: ChatTemplate, texts: Sequence[str]) -> Iterator[list[Document]]:
    """Yield the documents of each plain text, with the tokenizer's own special tokens and a final end-of-text token.
    Every token is a label. In a text that the chat template has rendered, the labels are the answers."""
    tokenizer = template.tokenizer
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    plain = [text for text in texts if not template.has_rendered(text)]
    tokens = iter(tokenizer(plain, return_attention_mask=False, verbose=False)["input_ids"] if plain else ())
    rendered = [[read_rendered(template, text)] for text in texts if template.has_rendered(text)]
    conversations = encode_conversations(template, rendered)
    for text in texts:
        if template.has_rendered(text):
            *before, last = next(conversations)
            yield [*before, replace(last, notes=RENDERED)]
        else:
            ids = without_second_bos(next(tokens), tokenizer)
            whole = ids if end and ids[-1:] == end else [*ids, *end]
            yield [Document.of(whole, np.ones(len(whole)))]


def read_rendered(template: ChatTemplate, text: str) -> Rendered:
    """Return a text that the chat template has rendered, with its answers."""
    traits = template.traits
    answers = []
    text = traits.with_bos(text)
    at = text.find(traits.opening)
    while at >= 0:
        start = at + len(traits.opening)
        # As in answers without reasoning, and in prompts.
        additions = (
            template.prompt_end.removesuffix(template.frame.opened) + template.frame.empty,
            template.prompt_end,
        )
        start += next((len(added) for added in additions if added and text.startswith(added, start)), 0)
        between = traits.ending + traits.next
        after = text.find(between, start) if between else -1
        end = template.ends.search(text, start, len(text) if after < 0 else after + len(between))
        unended = len(text) if after < 0 else after + len(traits.ending)
        stop = unended if end is None else end.end()
        if stop > start:
            answers.append((start, stop))
        at = text.find(traits.opening, stop)
    return Rendered(text[: stop if not text[stop:].strip() else None] if answers else text, answers)


def read_conversation(
    template: ChatTemplate, messages: Sequence[Message], *, place: str, tools: object = None, last_only: bool = False
) -> tuple[list[Rendered], list[str]]:
    """Return the rendered texts of a conversation with all its answers, or only with the last one, and notes on the
    answers. RecordError if it cannot be trained on."""
    messages = template.prepared(messages, place=place, tools=tools)
    texts: list[Rendered] = []
    notes = [] if tools is None or template.reads_tools else [NO_TOOLS]
    faults: list[RecordError] = []
    num_read = 0
    for answer in trained_answers(messages, place)[-1 if last_only else 0 :]:
        prompt = template.render(messages[:answer], place=place, tools=tools, answer_next=True)
        whole = template.render(messages[: answer + 1], place=place, tools=tools)
        try:
            prompt, whole, fresh_notes = _read_answer(template, messages[: answer + 1], prompt, whole, place)
            continues = texts != [] and prompt.startswith(texts[-1].text)
            before = texts[-1] if continues else Rendered("", [])
            fresh_text = whole[len(before.text) :]
            check_rendered([(answer + 1, messages[answer])], fresh_text, place, template.called, answer + 1)
        except RecordError as error:
            is_beside_call = "tool_calls" in messages[answer] and messages[answer]["content"].strip()
            if not is_beside_call or error.reason not in (LEFT_OUT, REWRITTEN):
                raise
            faults.append(error)
            continue
        fresh = enumerate(messages[num_read:answer], start=num_read + 1)
        check_rendered(fresh, fresh_text, place, template.called)
        texts[-1 if continues else len(texts) :] = [Rendered(whole, [*before.answers, (len(prompt), len(whole))])]
        notes += fresh_notes
        num_read = answer + 1
    if not texts:
        raise faults[0]
    return texts, notes + [BESIDE_CALL] * len(faults)


def trained_answers(messages: Sequence[Message], place: str) -> list[int]:
    """Return the numbers of the answers to train on. RecordError if there is none."""
    answers = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    trained = [n for n in answers if messages[n].get("weight") != 0]
    if trained:
        return trained
    if answers:
        what = "expected an answer to train on, got only answers of weight 0"
        raise RecordError(f"{place}: {what}", "whose answers all have weight 0")
    raise RecordError(f"{place}: expected an answer of the assistant, got none", "without an answer")


def _read_answer(
    template: ChatTemplate, messages: Sequence[Message], prompt: str, whole: str, place: str
) -> tuple[str, str, list[str]]:
    """Return the texts up to the first label and up to the last one of an answer, the last turn of `messages`, as the
    target would write it, and notes on it. `prompt` and `whole` are what the template renders of it."""
    frame = template.frame
    number = len(messages)
    message = messages[-1]
    reasoning = [message[key].strip() for key in REASONING if isinstance(message.get(key), str)]
    content = message["content"]
    if REASONING_END in content and blank(content) not in blank(whole):  # the template reads it from there
        reasoning.append(content.split(REASONING_END)[0].split("<think>")[-1].strip())
    reasoning = [*filter(None, reasoning)]
    if reasoning and frame.is_closed:
        raise _unasked(template, number, place)
    head, whole = _aligned(template, messages, prompt.removesuffix(frame.opened), whole, place)
    bare = head + frame.empty
    notes = [
        f"answers have a key {key!r}, which is not read; if it marks what not to train on, call it weight (0 or 1)"
        for key in message.keys() - KNOWN
        if WEIGHT_LIKE.search(key)
    ]
    if THOUGHTS.match(message["content"]):
        notes.append(TAGGED)
    if reasoning:
        written = prompt + frame.before + reasoning[0]
        is_rendered = all(text in whole[len(head) :] for text in reasoning)
        if frame.after:
            is_rendered = blank(whole).startswith(blank(written + frame.after.strip()[:1]))
        # Behind a reasoning, a channel's name stands for an answer, and not for a call.
        is_known = frame.after and not (frame.lead and "tool_calls" in message)
        if not is_rendered and not is_known:
            raise RecordError(
                f"{place}: the chat template drops the reasoning of turn {number}, which the target would write; "
                "give the source a chat_template that keeps it, or records without",
                "with reasoning that the chat template drops",
            )
        if not is_rendered:
            answer = whole[len(bare if whole.startswith(bare) else head) :]
            whole = written + frame.after + answer.lstrip("\n")
    elif frame.is_closed:
        whole = prompt + whole[len(head) :]
    elif bare != prompt and whole.startswith(bare):
        if (prompt.removeprefix(head) + frame.empty).strip():
            notes.append(template.unreasoned)
        prompt = bare
    elif OPENS.search(prompt):  # the template puts the answer into it
        notes.append(template.unreasoned)
    if not whole.startswith(prompt):
        prompt = prompt[: shared_start(prompt, whole)]
    for text in (message["content"], *reasoning):
        if (end := template.ends.search(text)) is not None and template.ends.sub("", text[end.end() :]).strip():
            raise RecordError(
                f"{place}: turn {number} has {end[0]!r} in its text, which ends an answer of the target; take it out",
                "with an end token in the text of an answer",
            )
    end = template.ends.search(whole, len(prompt))
    if message.get(FINISH) in CUT:
        whole = whole if end is None else whole[: end.start()]
    elif end is not None:
        whole = whole[: end.end()]
    else:
        whole += frame.following.get("tool" if "tool_calls" in message else "user", "")
    return prompt, whole, notes


def _unasked(template: ChatTemplate, number: int, place: str) -> RecordError:
    """Return the error of an answer with reasoning, turn `number`, where the prompt asks for none."""
    name = template.thinking_argument
    value = "true" if isinstance(template.arguments.get(name, True), bool) else "another value"
    remedy = f"set data.template.{name} to {value}" if name else "give the source a chat_template that asks for some"
    return RecordError(
        f"{place}: turn {number} has reasoning, and the prompt asks for none; {remedy}, or give records without",
        "with reasoning, where the prompt asks for none",
    )


def _aligned(template: ChatTemplate, messages: Sequence[Message], head: str, whole: str, place: str) -> tuple[str, str]:
    """Return the prompt and the text with its answer, so that the one begins with the other, from `head`, the prompt up
    to what stands in prompts alone, and `whole`, what the template renders of `messages`."""
    opening = template.traits.opening
    turn = head.removesuffix(template.prompt_end)
    before = head.removesuffix(opening)
    if whole.startswith(head):
        # After a tool's results the prompt may go on in their turn, without an opening (Gemma 4).
        is_opened = opening != "" and whole.startswith(head + opening)
        return head, head + whole[len(head + opening) :] if is_opened else whole
    if whole.startswith(
        turn
    ):  # an answer has no reasoning, for which prompts open one (Nemotron Nano 2), or ask for none
        return (turn, whole) if OPENS.search(head) else (head, head + whole[len(turn) :])
    if before != head and whole.startswith(before):  # it goes on in the turn of a tool's results (Apertus)
        return head, head + whole[len(before) :]
    return head, head + _after(template, messages, head, whole, place)


def _after(template: ChatTemplate, messages: Sequence[Message], head: str, whole: str, place: str) -> str:
    """Return the text of the last answer in `whole`, which does not begin as its prompt: what follows the end that the
    newest turn has in the prompt, as where a template renders the system prompt in the newest question (Mistral), or
    the answer's own text, as where it joins an answer to the results of tools before it (Gemma 4)."""
    *before, message = messages
    newest = before[-1]["content"].strip() if before else ""
    content = message["content"].strip()
    end = head[head.rfind(newest) :] if newest and newest in head else head
    if end in whole:
        return whole.rpartition(end)[2]
    at = whole.rfind(content) if content and not message.keys() & {"tool_calls", *REASONING} else -1
    if at < 0 or not template.ends.search(whole, at + len(content)):
        raise RecordError(
            f"{place}: the chat template rewrites what stands before the answer of turn {len(messages)}, so its "
            "labels cannot be found; give the source a chat_template that only appends",
            REWRITTEN,
        )
    return template.frame.lead + whole[at:]


def encode_conversations(
    template: ChatTemplate, conversations: Sequence[Sequence[Rendered]]
) -> Iterator[list[Document]]:
    """Yield the documents of each conversation, whose labels are its answers."""
    tokenizer = template.tokenizer
    texts = [rendered.text for conversation in conversations for rendered in conversation]
    options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
    encodings = iter(tokenizer(texts, **options).encodings or () if texts and tokenizer.is_fast else ())
    for conversation in conversations:
        pairs = zip(conversation, [*islice(encodings, len(conversation))], strict=False)
        labelled = [_label_answers(*pair, template.all_end_ids) for pair in pairs]
        documents = [document for document in labelled if document is not None]
        is_whole = len(documents) == len(conversation)
        yield documents if is_whole else encode_turn_by_turn(tokenizer, conversation)


def encode_turn_by_turn(tokenizer: PreTrainedTokenizerBase, texts: Iterable[Rendered]) -> list[Document]:
    """Return the documents of a conversation from tokens of each turn's own texts."""
    places = ((text, *span) for text, answers in texts for span in answers)
    pairs = ((token_ids(tokenizer, text[:start]), token_ids(tokenizer, text[:end])) for text, start, end in places)
    return join_texts((common_prefix(prompt, whole), whole) for prompt, whole in pairs)


def join_texts(texts: Iterable[tuple[int, list[int]]], *, train_on_prompts: bool = False) -> list[Document]:
    """Return texts, each with the length of its prompt, as documents. The labels are the answers' tokens. A text that
    begins with the whole document before it continues that document; another text begins a new one."""
    ids: list[int] = []
    labels: list[bool] = []
    documents: list[Document] = []
    for prompt, text in texts:
        if text[: len(ids)] != ids:
            documents.append(Document.of(ids, labels))
            ids = []
            labels = []
        start = max(len(labels), prompt)
        labels = labels + [train_on_prompts] * (start - len(labels)) + [True] * (len(text) - start)
        ids = text
    return [*documents, Document.of(ids, labels)] if ids else documents


def _label_answers(rendered: Rendered, encoding: Encoding, ends: Collection[int]) -> Document | None:
    """Return the document of a text, or None if no token begins at a place where an answer begins or ends."""
    ids = np.array(encoding.ids, dtype=np.int32)
    bounds = np.array([*encoding.offsets, (len(rendered.text), len(rendered.text) + 1)])
    places = np.array(rendered.answers)
    tokens = np.searchsorted(bounds[:, 1], places, side="right")  # the first token that ends after each place
    # The end token of some tokenizers takes the space after it along.
    inside = (bounds[tokens, 0] < places) & np.isin(np.append(ids, -1)[tokens], [*ends])
    if not (inside | (bounds[tokens, 0] == places)).all():
        return None
    labels = np.zeros(len(ids), dtype=np.bool_)
    for start, end in (tokens + inside).tolist():
        labels[start:end] = True
    return Document(ids, labels)


def token_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    return ids
