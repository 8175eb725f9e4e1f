"""Labels under the chat templates of nine model families, which are retyped here in short.

A label is what the target writes after the prompt as its server builds it. So the expected value of each answer is
built from two texts alone: the prompt as served, and what such a target writes, through to the token that ends it.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eval.data.data_files import Message
from train.data.chats import encode_conversations, read_conversation, read_rendered
from train.data.templates import ChatTemplate

Text = Callable[[Message], str]


@dataclass(frozen=True)
class Family:
    """A family's template, its end tokens, and what its models write."""

    template: str
    ends: str
    """Texts of the target's end ids, of which the first is the tokenizer's."""
    answer: Text
    """What the target writes as an answer, without reasoning."""
    call: Text | None = None
    """The same, as a turn that calls a tool. None: the template renders none."""
    reasoned: Text | None = None
    """The same, with reasoning. None: the template renders none."""
    bare: tuple[str, str] = ("", "")
    """Without reasoning: the end of the prompt that the document does not have, and what it has there instead."""
    arguments: dict[str, Any] = field(default_factory=dict)
    specials: str = ""
    """Further special tokens."""
    strips: bool = False
    """The special tokens take the space after them along."""


def arguments(message: Message) -> str:
    return json.dumps(message["tool_calls"][0]["function"]["arguments"])


LLAMA_3 = Family(
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}"
    "<|end_header_id|>\n\n{% if m.tool_calls %}{% set c = m.tool_calls[0].function %}"
    """{{ '{"name": "' + c.name + '", "parameters": ' }}{{ c.arguments | tojson }}{{ '}' }}"""
    "{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    ends="<|end_of_text|> <|eom_id|> <|eot_id|>",
    specials="<|start_header_id|> <|end_header_id|>",
    answer=lambda m: m["content"] + "<|eot_id|>",
    call=lambda m: f'{{"name": "look", "parameters": {arguments(m)}}}<|eot_id|>',
)

NEWEST = (
    "{% set ns = namespace(newest=0) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.newest = loop.index0 %}{% endif %}{% endfor %}"
)
"""Sets `ns.newest` to the number of the newest question."""
CHATML_CALLS = (
    "{% for c in m.tool_calls %}{% set c = c.function or c %}"
    """{{ '\n<tool_call>\n{"name": "' + c.name + '", "arguments": ' }}{{ c.arguments | tojson }}"""
    """{{ '}\n</tool_call>' }}"""
    "{% endfor %}"
)
CHATML_TOOL = "<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
QWEN_2_5 = Family(
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are Qwen.<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}" + CHATML_TOOL + "{% elif m.tool_calls %}<|im_start|>assistant"
    "{% if m.content %}{{ '\n' + m.content }}{% endif %}" + CHATML_CALLS + "<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    ends="<|im_end|> <|endoftext|>",
    specials="<|im_start|>",
    answer=lambda m: m["content"] + "<|im_end|>",
    call=lambda m: f'<tool_call>\n{{"name": "look", "arguments": {arguments(m)}}}\n</tool_call><|im_end|>',
)

# Turns after the newest question have their reasoning, if only an empty one; earlier ones have none.
QWEN_3 = Family(
    NEWEST + "{% for m in messages %}{% if m.role == 'tool' %}" + CHATML_TOOL + "{% else %}"
    "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.index0 > ns.newest"
    " and (loop.last or m.reasoning_content) %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}"
    "{{ m.content }}" + CHATML_CALLS.replace("'\n<tool_call>", "'<tool_call>") + "<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
    ends="<|im_end|> <|endoftext|>",
    specials="<|im_start|>",
    answer=QWEN_2_5.answer,
    call=QWEN_2_5.call,
    reasoned=lambda m: f"<think>\n{m['reasoning_content']}\n</think>\n\n{m['content']}<|im_end|>",
    bare=("", "<think>\n\n</think>\n\n"),
)
QWEN_3_NOT_THINKING = replace(QWEN_3, arguments={"enable_thinking": False}, reasoned=None, bare=("", ""))

PHI_3 = Family(
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}",
    ends="<|endoftext|> <|assistant|> <|end|>",
    specials="<|user|> <|system|>",
    strips=True,
    answer=lambda m: m["content"] + "<|end|>",
)

# The system prompt stands in the newest question, of prompts alone.
MISTRAL = Family(
    "{{ bos_token }}{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% for m in (messages[1:] if system else messages) %}{% if m.role == 'user' %}[INST] "
    "{{ system + '\n\n' if loop.last and system }}{{ m.content }}[/INST]{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id | length != 9 %}{{ raise_exception('nine') }}{% endif %}"
    """[TOOL_RESULTS] {{ '{"content": ' + m.content + ', "call_id": "' + m.tool_call_id + '"}' }}[/TOOL_RESULTS]"""
    "{% elif m.tool_calls is defined %}[TOOL_CALLS] [{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}"
    """{{ (c.function | tojson)[:-1] + ', "id": "' + c.id + '"}' }}{% endfor %}]{{ eos_token }}"""
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}",
    ends="</s>",
    specials="[INST] [/INST] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS]",
    answer=lambda m: f" {m['content']}</s>",
    call=lambda m: f'[TOOL_CALLS] [{{"name": "look", "arguments": {arguments(m)}, "id": "call00001"}}]</s>',
)

# The prompt opens a reasoning, and no answer keeps its own.
DEEPSEEK_R1 = Family(
    "{{ bos_token }}{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
    "{% set ns = namespace(told=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.told = 0 %}{{ '<|User|>' + m.content }}"
    "{% elif m.role == 'tool' %}{% set ns.told = 1 %}<|tool_outputs_begin|>{{ m.content }}<|tool_outputs_end|>"
    "{% elif m.tool_calls %}<|Assistant|>{{ m.content }}<|tool_calls_begin|>{% for c in m.tool_calls %}"
    "{{ c.type + '<|tool_sep|>' + c.function.name + '\n```json\n' + c.function.arguments + '\n```' }}{% endfor %}"
    "<|tool_calls_end|><|end_of_sentence|>{% elif m.role == 'assistant' %}{{ '' if ns.told else '<|Assistant|>' }}"
    "{{ m.content.split('</think>')[-1] }}<|end_of_sentence|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt and not ns.told %}<|Assistant|><think>\n{% endif %}",
    ends="<|end_of_sentence|>",
    specials="<|User|> <|Assistant|> <|tool_calls_begin|> <|tool_calls_end|> <|tool_sep|>",
    answer=lambda m: m["content"] + "<|end_of_sentence|>",
    call=lambda m: (
        "<|tool_calls_begin|>function<|tool_sep|>look\n```json\n" + arguments(m) + "\n```"
        "<|tool_calls_end|><|end_of_sentence|>"
    ),
    reasoned=lambda m: f"{m['reasoning_content']}\n</think>\n\n{m['content']}<|end_of_sentence|>",
    bare=("<think>\n", ""),
)

# <|return|> ends what the target writes, <|end|> the turns of the history; the target names its channel itself.
GPT_OSS = Family(
    "<|start|>system<|message|>You are ChatGPT.<|end|>{% for m in messages %}{% if m.role == 'system' %}"
    "<|start|>developer<|message|># Instructions\n\n{{ m.content }}\n\n<|end|>{% elif m.role == 'tool' %}"
    "<|start|>functions.look to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>"
    "{% elif m.tool_calls is defined %}{% set c = m.tool_calls[0].function %}"
    "<|start|>assistant to=functions.{{ c.name }}<|channel|>commentary json<|message|>"
    "{{ c.arguments | tojson }}<|call|>{% elif m.role == 'assistant' %}"
    "{% if loop.last and m.thinking is defined %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}"
    "<|end|>{% endif %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last else '<|end|>' }}{% else %}"
    "<|start|>user<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
    ends="<|return|> <|endoftext|> <|call|>",
    specials="<|start|> <|message|> <|channel|> <|end|>",
    answer=lambda m: f"<|channel|>final<|message|>{m['content']}<|return|>",
    call=lambda m: f" to=functions.look<|channel|>commentary json<|message|>{arguments(m)}<|call|>",
    reasoned=lambda m: (
        f"<|channel|>analysis<|message|>{m['reasoning_content']}<|end|>"
        f"<|start|>assistant<|channel|>final<|message|>{m['content']}<|return|>"
    ),
)

# No token ends a turn: the target stops by writing whose turn is next.
GLM_4_5 = Family(
    "[gMASK]<sop>" + NEWEST + "{% for m in messages %}{% if m.role == 'tool' %}"
    "<|observation|>\n<tool_response>\n{{ m.content }}\n</tool_response>{% elif m.role == 'assistant' %}<|assistant|>"
    "{{ '\n<think>' + (m.reasoning_content or '' if loop.index0 > ns.newest else '') + '</think>' }}"
    "{{ '\n' + m.content if m.content }}{% for c in m.tool_calls or [] %}{{ '\n<tool_call>' + c.function.name + '\n' }}"
    "{% for k, v in c.function.arguments.items() %}"
    "{{ '<arg_key>' + k + '</arg_key>\n<arg_value>' + v + '</arg_value>\n' }}{% endfor %}</tool_call>"
    "{% endfor %}{% else %}<|{{ m.role }}|>{{ '\n' + m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '\n<think></think>' }}{% endif %}{% endif %}",
    ends="<|endoftext|> <|user|> <|observation|>",
    specials="<|assistant|> <|system|> [gMASK] <sop>",
    answer=lambda m: m["content"] + "<|user|>",
    call=lambda m: "<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>sea</arg_value>\n</tool_call><|observation|>",
    reasoned=lambda m: f"\n<think>{m['reasoning_content']}</think>\n{m['content']}<|user|>",
    bare=("", "\n<think></think>\n"),
)
GLM_4_5_NOT_THINKING = replace(
    GLM_4_5,
    arguments={"enable_thinking": False},
    answer=lambda m: "\n" + GLM_4_5.answer(m),
    call=None,
    reasoned=None,
    bare=("", ""),
)

# The prompt opens a reasoning, in whose place an answer without one has an empty one of another form.
NEMOTRON_3 = Family(
    NEWEST + "{% for m in messages %}{% if m.role == 'tool' %}" + CHATML_TOOL + "{% else %}"
    "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% if m.reasoning_content and loop.index0 > ns.newest %}"
    "{{ '<think>\n' + m.reasoning_content + '\n</think>\n' }}{% else %}<think></think>{% endif %}{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for k, v in c.function.arguments | items %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>\n{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
    ends="<|im_end|>",
    specials="<|im_start|>",
    answer=QWEN_2_5.answer,
    call=lambda m: (
        "<tool_call>\n<function=look>\n<parameter=at>\nsea\n</parameter>\n</function>\n</tool_call>\n<|im_end|>"
    ),
    reasoned=lambda m: f"{m['reasoning_content']}\n</think>\n{m['content']}<|im_end|>",
    bare=("\n", "</think>"),
)

FAMILIES = {
    "Llama 3": LLAMA_3,
    "Qwen2.5": QWEN_2_5,
    "Qwen3": QWEN_3,
    "Qwen3, not thinking": QWEN_3_NOT_THINKING,
    "Phi-3": PHI_3,
    "Mistral": MISTRAL,
    "DeepSeek-R1": DEEPSEEK_R1,
    "gpt-oss": GPT_OSS,
    "GLM-4.5": GLM_4_5,
    "GLM-4.5, not thinking": GLM_4_5_NOT_THINKING,
    "Nemotron 3": NEMOTRON_3,
}

CALL = {"id": "call_00001", "type": "function", "function": {"name": "look", "arguments": {"at": "sea"}}}
TURNS: list[Message] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "the sea"},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": "a <b>beach</b>"},
]
REASONED = [m if m["role"] == "user" else m | {"reasoning_content": f"so {n}, hi"} for n, m in enumerate(TURNS)]
CALLED: list[Message] = [
    TURNS[0],
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "3", "tool_call_id": "call_00001"},
    TURNS[1],
]
CASES: dict[str, list[Message]] = {
    "two turns": TURNS,
    "system prompt": [{"role": "system", "content": "Be kind."}, *TURNS],
    "reasoning": REASONED,
    "reasoning in one turn": [*TURNS[:2], *REASONED[2:]],
    "a call": CALLED[:2],
    "a call and its result": CALLED,
}


@cache
def template_of(name: str) -> ChatTemplate:
    """A family's template, with a tokenizer whose tokens are bytes and the family's special tokens."""
    family = FAMILIES[name]
    alphabet = {letter: n for n, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bytes_alone = Tokenizer(models.BPE(alphabet, []))
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone.decoder = decoders.ByteLevel()
    ends = family.ends.split()
    added = [
        AddedToken(text, special=True, rstrip=family.strips) for text in [*ends, *family.specials.split(), "<bos>"]
    ]
    bytes_alone.add_special_tokens(added)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_alone, bos_token="<bos>", eos_token=ends[0])
    tokenizer.chat_template = family.template
    end_ids: Any = tokenizer.convert_tokens_to_ids(ends)
    return ChatTemplate(tokenizer, arguments=family.arguments, end_ids=end_ids)


def written(family: Family, message: Message) -> str | None:
    if "reasoning_content" in message:
        return family.reasoned and family.reasoned(message)
    if "tool_calls" in message:
        return family.call and family.call(message)
    return family.answer(message)


def renders(family: Family, messages: list[Message]) -> bool:
    return all(written(family, message) is not None for message in messages if message["role"] == "assistant")


@pytest.mark.parametrize(
    ("name", "case"), [(name, case) for name in FAMILIES for case in CASES if renders(FAMILIES[name], CASES[case])]
)
def test_labels_are_what_the_target_writes_after_the_prompt_as_served(name: str, case: str) -> None:
    family, template, messages = FAMILIES[name], template_of(name), CASES[case]
    tokenizer = template.tokenizer
    answers = [n for n, message in enumerate(messages) if message["role"] == "assistant"]

    def ids(text: str) -> list[int]:
        found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    expected = []
    for n in answers:
        prompt = template.render(template.prepared(messages[:n], place=""), place="", answer_next=True)
        if "reasoning_content" not in messages[n] and prompt.endswith(family.bare[0]):
            prompt = prompt.removesuffix(family.bare[0]) + family.bare[1]
        expected.append((ids(prompt), ids(str(written(family, messages[n])))))

    texts, _ = read_conversation(template, messages, place="f:1")
    (documents,) = encode_conversations(template, [texts])
    found = []
    for document in documents:
        at = 0
        for is_label, run in groupby(document.labels.tolist()):
            end = at + len(list(run))
            if is_label:
                found.append((document.ids[:at].tolist(), document.ids[at:end].tolist()))
            at = end
    readable = [[tuple(map(tokenizer.decode, pair)) for pair in pairs] for pairs in (found, expected)]
    assert readable[0] == readable[1] and found == expected


@pytest.mark.parametrize(
    ("name", "case"), [(name, case) for name in FAMILIES for case in CASES if renders(FAMILIES[name], CASES[case])]
)
def test_rendered_text_has_the_labels_of_its_conversation(name: str, case: str) -> None:
    template, messages = template_of(name), CASES[case]
    (first, *others), _ = read_conversation(template, messages, place="f:1")
    text = template.render(template.prepared(messages, place=""), place="")
    if others or not text.startswith(first.text):
        return  # the template rewrites turns, and no text has the labels of all answers
    assert template.has_rendered(text)
    answers = first.answers
    if name in ("Mistral", "DeepSeek-R1"):
        answers = answers[: 1 if messages is CALLED else None]  # nothing marks one straight after a tool's result
    assert read_rendered(template, text).answers == answers
