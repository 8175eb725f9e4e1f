"""Labels found by rendering: compared with masks made by hand, token for token."""

import copy
from datetime import date
from itertools import chain
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase as Tokenizer

from eval.data.chat_template import ChatTemplate
from eval.data.conversation_forms import REASONING, Chat, read_chat
from eval.data.data_files import RecordError
from eval.data.prompts import render
from eval.data.template_arguments import with_arguments
from heads.core.errors import UserError
from tests.support.chats import bracketed, encode_chat, talk
from train.data.chats import encode_conversations, encode_texts, encode_turn_by_turn, read_conversation
from train.data.dialogues import ChatDialogue

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# As reasoning models do: what stands before </think> is dropped from every answer but the last.
FORGETFUL = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and not loop.last %}"
    "{{ m.content.split('/think ')[-1] }}{% else %}{{ m.content }}{% endif %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
REWRITING = "{{ messages | length }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"

TALK = [{"role": "system", "content": "be kind"}, *talk("hi", "the sea", "and", "sand")]


def marked(tokenizer: Tokenizer, messages: list[dict[str, Any]], template: str | None = None) -> list[str]:
    return bracketed(tokenizer, encode_chat(tokenizer, messages, chat_template=template))


def first_prompt(template: ChatTemplate, messages: list[dict[str, Any]], tools: Any = None) -> list[int] | None:
    """The tokens that are put to the target first."""
    return ChatDialogue(template, Chat(messages, tools, "", ()), "f:1", 100).prompt


THINKING = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>the{% endif %}"
)
# Nothing but a space between the turns, so that merges cross it.
RUNNING_ON = "{% for m in messages %}{{ m.role[0] }} {{ m.content }} {% endfor %}{{ 'a' if add_generation_prompt }}"
MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WORDS = st.text(st.sampled_from("the sander\n é</|>"), max_size=12) | st.sampled_from(["</s>", "<|assistant|>", "th"])


@settings(deadline=None)
@given(turns=st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=4))
@pytest.mark.parametrize("template", [None, CHATML, FORGETFUL, THINKING, RUNNING_ON, MARKED])
def test_offsets_give_the_labels_that_the_tokens_of_each_turn_give(
    template: str | None, turns: list[tuple[str, str]], tokenizer: Tokenizer
) -> None:
    assume(not any("</s>" in answer.removesuffix("</s>") for _, answer in turns))  # they are left out
    chat = ChatTemplate(tokenizer, template)
    texts, _ = read_conversation(chat, talk(*chain.from_iterable(turns)), place="f:1")
    (found,) = encode_conversations(chat, [texts])
    both = found, encode_turn_by_turn(tokenizer, texts)
    ours, expected = ([(d.ids.tolist(), d.labels.tolist()) for d in documents] for documents in both)
    assert ours == expected


@pytest.mark.parametrize(
    "answer", [{"content": "<think>so</think>sea"}, *({"content": "sea", key: "so"} for key in REASONING)]
)
def test_a_template_that_drops_reasoning_which_the_record_holds_is_refused(
    answer: dict[str, Any], tokenizer: Tokenizer
) -> None:
    turns = [TALK[1], {"role": "assistant", **answer}]
    dropping = CHATML.replace("m.content", "m.content.split('</think>')[-1]")
    keeping = CHATML.replace("m.content", "(m.reasoning_content or '') ~ m.content")
    with pytest.raises(RecordError, match=r"f:1: the chat template drops the reasoning of turn 2") as caught:
        encode_chat(tokenizer, turns, dropping, place="f:1")
    assert caught.value.reason == "with reasoning that the chat template drops"
    (document,) = encode_chat(tokenizer, turns, keeping, place="f:1")
    assert "so" in str(tokenizer.decode(document.ids[document.labels]))


def test_arguments_reach_the_template(tokenizer: Tokenizer) -> None:
    template = CHATML.replace("<|assistant|>\n", "<|assistant|>\n{% if calm is defined and calm %}so {% endif %}")
    prompt = first_prompt(ChatTemplate(tokenizer, template, {"calm": True}), TALK[1:3])
    assert prompt is not None and str(tokenizer.decode(prompt)).endswith("<|assistant|>\nso ")
    for own in (template, "{% generation %}" + template + "{% endgeneration %}"):
        assert ChatTemplate(tokenizer, own).arguments_read() == ["calm"]
    for form in ({"default": template, "tool_use": template}, template):
        twin = with_template(tokenizer, form)
        _, asked = render(TALK[1:2], with_arguments(twin, {"calm": True}))
        assert list(asked) == prompt and twin.chat_template == form


def test_a_template_sees_the_day_that_it_is_given(tokenizer: Tokenizer) -> None:
    dated = "{{ strftime_now('%d %b %Y, %-d/%m') }}|" + CHATML
    chat = ChatTemplate(tokenizer, dated, day=date(2031, 2, 3))
    assert chat.has_date and not ChatTemplate(tokenizer, CHATML).has_date
    stated = "{{ day if day is defined else strftime_now('%A') }}|" + CHATML
    assert ChatTemplate(tokenizer, stated).has_date and not ChatTemplate(tokenizer, stated, {"day": "Monday"}).has_date
    for case in ("tools", "messages[0].role != 'system'", "messages | length > 3"):
        assert ChatTemplate(tokenizer, "{% if " + case + " %}{{ strftime_now('%j') }}{% endif %}" + CHATML).has_date
    assert chat.render(TALK[1:3], place="f:1").startswith("03 Feb 2031, 3/02|<|user|>")
    own = "{% if strftime_now is defined %}{{ strftime_now('%Y-%m-%d') }}{% endif %}"
    assert ChatTemplate(tokenizer, own, day=date(2031, 2, 3)).render(TALK, place="f:1") == "2031-02-03"
    now = ChatTemplate(tokenizer, own).render(TALK, place="f:1")
    assert now == tokenizer.apply_chat_template(TALK, chat_template=own, tokenize=False)


def test_an_answer_follows_its_prompt_as_served_where_the_template_rewrites_it(tokenizer: Tokenizer) -> None:
    assert marked(tokenizer, TALK[1:3], REWRITING) == ["1<|user|>hi</s>[<|assistant|>the sea</s>]"]
    emptied = "{% for m in messages %}{{ m.content if loop.last }}{% endfor %}"
    with pytest.raises(UserError, match=r"f:3: the chat template rewrites what stands before the answer of turn 2"):
        encode_chat(tokenizer, TALK[1:3], place="f:3", chat_template=emptied)


@pytest.mark.parametrize("answer", ["`</s>` ends a turn", "a</s>b"])
def test_an_end_token_inside_an_answer_is_no_label(answer: str, tokenizer: Tokenizer) -> None:
    with pytest.raises(RecordError, match=r"f:1: turn 2 has '</s>' in its text") as caught:
        encode_chat(tokenizer, talk("hi", answer), place="f:1")
    assert caught.value.reason == "with an end token in the text of an answer"
    assert marked(tokenizer, talk("`</s>`?", "so</s>")) == ["<s><|user|>`</s>`?<|assistant|>[so</s>]"]


def weighted(first: dict[str, Any], last: dict[str, Any]) -> list[dict[str, Any]]:
    turns = [TALK[1], {**TALK[2], **first}, TALK[3], {**TALK[4], **last}]
    return read_chat(("f:1", {"messages": turns})).messages


@pytest.mark.parametrize(
    "mark", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"loss": False}, {"loss_weight": 0.0}, {"trainable": 0}]
)
def test_an_answer_of_weight_0_is_context(mark: dict[str, Any], tokenizer: Tokenizer) -> None:
    one = dict.fromkeys(mark, 1)
    whole = "<s><|user|>hi<|assistant|>{}<|user|>and<|assistant|>{}"
    assert marked(tokenizer, weighted(mark, one)) == [whole.format("the sea</s>", "[sand</s>]")]
    assert marked(tokenizer, weighted(one, mark)) == ["<s><|user|>hi<|assistant|>[the sea</s>]"]
    (document,) = encode_chat(tokenizer, weighted(one, mark), last_only=True)
    assert tokenizer.decode(document.ids[document.labels]) == "the sea</s>", "the last answer to train on"


def test_null_says_nothing_where_every_turn_of_a_table_has_the_column() -> None:
    turns = [{**turn, "weight": weight} for turn, weight in zip(TALK, (None, 0, None, 0, 0), strict=True)]
    assert ["weight" in turn for turn in read_chat(("f:1", {"messages": turns})).messages] == [False] * 4 + [True]


def test_calls_of_tools_have_the_form_that_the_template_reads(tokenizer: Tokenizer) -> None:
    """Here name and arguments alone; the other forms are those of the families in test_templates.py."""
    call = "{% for c in m.tool_calls or [] %}<call>{{ c.name }}({{ c.arguments.at }}){% endfor %}"
    template = CHATML.replace("{{ m.content }}", "{{ m.content }}" + call)
    function: dict[str, Any] = {"name": "look", "arguments": {"at": "sea"}}
    as_text = {"name": "look", "arguments": '{"at": "sea"}'}
    for form in ({"type": "function", "function": as_text}, {"type": "function", "function": function}, function):
        calling = {"role": "assistant", "content": "", "tool_calls": [form]}
        text = "<|user|>\nhi</s>\n<|assistant|>\n[<call>look(sea)</s>]\n<|tool|>\nso</s>\n<|assistant|>\n[the sea</s>]"
        assert marked(tokenizer, [TALK[1], calling, {"role": "tool", "content": "so"}, TALK[2]], template) == [text]


def test_tools_are_what_the_template_is_given(tokenizer: Tokenizer) -> None:
    template = "{% if tools %}<tools>{{ tools[0].name }}{% endif %}" + CHATML
    prompt = first_prompt(ChatTemplate(tokenizer, template), TALK[1:3], [{"name": "look"}])
    assert prompt is not None and tokenizer.decode(prompt) == "<tools>look<|user|>\nhi</s>\n<|assistant|>\n"


def test_text_is_all_labels_and_ends_with_end_of_text(tokenizer: Tokenizer) -> None:
    ((document,),) = encode_texts(ChatTemplate(tokenizer), ["the sea"])
    assert tokenizer.decode(document.ids.tolist()) == "the sea</s>" and document.labels.all()


def test_text_that_the_template_has_rendered_has_one_bos_and_the_labels_of_a_chat(tokenizer: Tokenizer) -> None:
    text = str(tokenizer.apply_chat_template(TALK, tokenize=False))
    (documents,) = encode_texts(ChatTemplate(tokenizer), [text])
    assert bracketed(tokenizer, documents) == marked(tokenizer, TALK)
    prompt, ids = render([{"role": "user", "content": "<s><|user|>hi<|assistant|>"}], tokenizer)
    assert prompt == "<s><|user|>hi<|assistant|>" and tokenizer.decode([*ids]) == prompt


def test_a_template_that_reads_parts_gets_them_and_one_that_leaves_a_turn_out_is_named(tokenizer: Tokenizer) -> None:
    parts = CHATML.replace("{{ m.content }}", "{% for part in m['content'] %}{{ part['text'] }}{% endfor %}")
    assert marked(tokenizer, TALK, parts) == marked(tokenizer, TALK, CHATML)
    text, _ = render(TALK[:2], with_template(tokenizer, parts))
    assert text == "<|system|>\nbe kind</s>\n<|user|>\nhi</s>\n<|assistant|>\n"
    deaf = CHATML.replace("{{ m.content }}", "{{ m.content if m.role != 'system' }}")
    with pytest.raises(RecordError, match=r"f:1: the chat template .*turn 1"):
        encode_chat(tokenizer, TALK, place="f:1", chat_template=deaf)


def with_template(tokenizer: Tokenizer, template: Any) -> Tokenizer:
    twin: Any = copy.copy(tokenizer)
    twin.chat_template = template
    return twin  # type: ignore[no-any-return]


def test_chat_data_needs_a_template(tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match=r"no chat template.*use kind text"):
        ChatTemplate(with_template(tokenizer, None)).check("x.jsonl")
