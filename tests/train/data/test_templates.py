"""Labels under the chat templates of model families, which are retyped here in short.

A label is what the target writes after the prompt as its server builds it. So the expected value of each answer is
built from two texts alone: the prompt as served, and what such a target writes, through to the token that ends it.
"""

from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eval.data.chat_template import ChatTemplate
from eval.data.data_files import Message, RecordError
from eval.data.template_traits import blank
from train.data.chats import BESIDE_CALL, TAGGED, encode_conversations, read_conversation, read_rendered


@dataclass(frozen=True)
class Family:
    """A family's template, its end tokens, and what its models write."""

    template: str
    tokens: str
    """Texts of the target's end ids, of which the first is the tokenizer's; after a comma, further special tokens."""
    answer: str | None = None
    """What the target writes as an answer, with {} for its text. None: the text and the first end."""
    call: str | None = None
    """What it writes as a turn that calls a tool. None: the template renders none."""
    reasoned: str | None = None
    """What it writes before an answer, with WHY for its reasoning. None: the template renders none."""
    bare: tuple[str, str] = ("", "")
    """Without reasoning: the end of the prompt that the document does not have, and what it has there instead."""
    bare_call: tuple[str, str] = ("", "")
    """The same of a turn that calls a tool."""
    arguments: dict[str, Any] = field(default_factory=dict)
    asks_for_none: bool = False
    """The prompt asks for an answer without reasoning."""
    strips: bool = False
    """The special tokens take the space after them along."""

    @property
    def ends(self) -> list[str]:
        return self.tokens.partition(",")[0].split()


def without_reasoning(family: Family, **arguments: Any) -> Family:
    """The family whose prompts ask for none by these arguments."""
    return replace(family, arguments=arguments, reasoned=None, bare=("", ""), asks_for_none=True)


LLAMA_3 = Family(
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}"
    "<|end_header_id|>\n\n{% if m.tool_calls %}{% set c = m.tool_calls[0].function %}"
    """{{ '{"name": "' + c.name + '", "parameters": ' }}{{ c.arguments | tojson }}{{ '}' }}"""
    "{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    tokens="<|end_of_text|> <|eom_id|> <|eot_id|>, <|start_header_id|> <|end_header_id|>",
    answer="{}<|eot_id|>",
    call='{"name": "look", "parameters": {"at": "sea"}}<|eot_id|>',
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
INLINE_CALLS = CHATML_CALLS.replace("'\n<tool_call>", "'<tool_call>")
CHATML_TOOL = "<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
QWEN_2_5 = Family(
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are Qwen.<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}" + CHATML_TOOL + "{% elif m.tool_calls %}<|im_start|>assistant"
    "{% if m.content %}{{ '\n' + m.content }}{% endif %}" + CHATML_CALLS + "<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    tokens="<|im_end|> <|endoftext|>, <|im_start|>",
    call='<tool_call>\n{"name": "look", "arguments": {"at": "sea"}}\n</tool_call><|im_end|>',
)

# Turns after the newest question have their reasoning, if only an empty one; earlier ones have none.
QWEN_3 = replace(
    QWEN_2_5,
    template=NEWEST + "{% for m in messages %}{% if m.role == 'tool' %}" + CHATML_TOOL + "{% else %}"
    "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.index0 > ns.newest"
    " and (loop.last or m.reasoning_content) %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}"
    "{{ m.content }}" + INLINE_CALLS + "<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
    reasoned="<think>\nWHY\n</think>\n\n",
    bare=("", "<think>\n\n</think>\n\n"),
)
QWEN_3_NOT_THINKING = without_reasoning(QWEN_3, enable_thinking=False)

PHI_3 = Family(
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}",
    tokens="<|endoftext|> <|assistant|> <|end|>, <|user|> <|system|>",
    strips=True,
    answer="{}<|end|>",
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
    tokens="</s>, [INST] [/INST] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS]",
    answer=" {}</s>",
    call='[TOOL_CALLS] [{"name": "look", "arguments": {"at": "sea"}, "id": "call00001"}]</s>',
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
    tokens="<|end_of_sentence|>, <|User|> <|Assistant|> <|tool_calls_begin|> <|tool_calls_end|> <|tool_sep|>",
    call='<|tool_calls_begin|>function<|tool_sep|>look\n```json\n{"at": "sea"}\n```<|tool_calls_end|>'
    "<|end_of_sentence|>",
    reasoned="WHY\n</think>\n\n",
    bare=("<think>\n", ""),
)

# <|return|> ends what the target writes, <|end|> the turns of the history; the target names its channel itself.
GPT_OSS = Family(
    "<|start|>system<|message|>You are ChatGPT.<|end|>{% for m in messages %}{% if m.role == 'system' %}"
    "<|start|>developer<|message|># Instructions\n\n{{ m.content }}\n\n<|end|>{% elif m.role == 'tool' %}"
    "<|start|>functions.look to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>"
    "{% elif m.tool_calls is defined %}{% set c = m.tool_calls[0].function %}<|start|>assistant to=functions."
    "{{ c.name }}<|channel|>commentary json<|message|>{{ c.arguments | tojson }}<|call|>"
    "{% elif m.role == 'assistant' %}{% if loop.last and m.thinking is defined %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}{{ '<|return|>' if loop.last else '<|end|>' }}"
    "{% else %}<|start|>user<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}"
    "<|start|>assistant{% endif %}",
    tokens="<|return|> <|endoftext|> <|call|>, <|start|> <|message|> <|channel|> <|end|>",
    answer="<|channel|>final<|message|>{}<|return|>",
    call=' to=functions.look<|channel|>commentary json<|message|>{"at": "sea"}<|call|>',
    reasoned="<|channel|>analysis<|message|>WHY<|end|><|start|>assistant",
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
    tokens="<|endoftext|> <|user|> <|observation|>, <|assistant|> <|system|> [gMASK] <sop>",
    answer="{}<|user|>",
    call="<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>sea</arg_value>\n</tool_call><|observation|>",
    reasoned="\n<think>WHY</think>\n",
    bare=("", "\n<think></think>\n"),
)
GLM_4_5_NOT_THINKING = replace(without_reasoning(GLM_4_5, enable_thinking=False), answer="\n{}<|user|>", call=None)

# The prompt opens a reasoning, in whose place an answer without one has an empty one of another form.
NEMOTRON_3 = Family(
    NEWEST + "{% for m in messages %}{% if m.role == 'tool' %}" + CHATML_TOOL + "{% else %}"
    "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% if m.reasoning_content and loop.index0 > ns.newest %}"
    "{{ '<think>\n' + m.reasoning_content + '\n</think>\n' }}{% else %}<think></think>{% endif %}{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for k, v in c.function.arguments | items %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>\n{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
    tokens="<|im_end|>, <|im_start|>",
    call="<tool_call>\n<function=look>\n<parameter=at>\nsea\n</parameter>\n</function>\n</tool_call>\n<|im_end|>",
    reasoned="WHY\n</think>\n",
    bare=("\n", "</think>"),
)

# The prompt opens a reasoning, which turns after the newest question have, if only an empty one.
QWEN_3_5 = replace(
    QWEN_3,
    template=NEWEST + "{% for m in messages %}{% if m.role == 'tool' %}" + CHATML_TOOL + "{% else %}"
    "<|im_start|>{{ m.role }}\n{% set parts = m.content.split('</think>') %}"
    "{% if m.role == 'assistant' and loop.index0 > ns.newest %}<think>\n"
    "{{ (m.reasoning_content or (parts[0].split('<think>')[-1] if parts[1:] else '')) | trim }}\n</think>\n\n"
    "{% endif %}{{ parts[-1].lstrip('\n') if m.role == 'assistant' else m.content }}"
    + INLINE_CALLS
    + "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n"
    "{% if enable_thinking is defined and not enable_thinking %}\n</think>\n\n{% endif %}{% endif %}",
    reasoned="WHY\n</think>\n\n",
    bare=("", "\n</think>\n\n"),
)
# Every turn keeps its reasoning, which is read from its field alone.
QWEN_3_8 = replace(
    QWEN_3_5,
    template="{% for m in messages %}{% if m.role == 'tool' %}" + CHATML_TOOL + "{% else %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and (preserve_thinking is not defined or preserve_thinking) %}<think>\n"
    "{{ m.reasoning_content | default('') | trim }}\n</think>\n\n{% endif %}{{ m.content }}"
    + INLINE_CALLS
    + "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
)

# The prompt says whether a reasoning follows; no final answer keeps its own.
DEEPSEEK_V3_1 = Family(
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}"
    "{% elif m.role == 'assistant' %}<|Assistant|></think>{{ m.content.split('</think>')[-1] }}<|end_of_sentence|>"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|Assistant|>"
    "{{ '<think>' if thinking else '</think>' }}{% endif %}",
    tokens="<|end_of_sentence|>, <|User|> <|Assistant|>",
    asks_for_none=True,
)
DEEPSEEK_V3_1_THINKING = replace(
    DEEPSEEK_V3_1,
    asks_for_none=False,
    arguments={"thinking": True},
    reasoned="WHY</think>",
    bare=("<think>", "</think>"),
)
# Turns after the newest question have their reasoning, if only an empty one, as DeepSeek-V4's do.
DEEPSEEK_V3_2 = replace(
    DEEPSEEK_V3_1_THINKING,
    template="{{ bos_token }}" + NEWEST + "{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}"
    "<|Assistant|>{{ '<think>' if loop.index0 == ns.newest else '</think>' }}{% elif m.role == 'assistant' %}"
    "{{ (m.reasoning_content or '') + '</think>' if loop.index0 > ns.newest }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '\n\n' }}"
    '<invoke name="{{ c.function.name }}">{{ c.function.arguments | tojson }}</invoke>{% endfor %}<|end_of_sentence|>'
    "{% elif m.role == 'tool' %}\n\n<result>{{ m.content }}</result>\n\n<think>{% else %}{{ m.content }}"
    "{% endif %}{% endfor %}",
    arguments={},
    call='\n\n<invoke name="look">{"at": "sea"}</invoke><|end_of_sentence|>',
    bare=("", "</think>"),
)
# As V3.1, but the newest answer has its reasoning, and one token less ends the prompt.
GLM_4_7 = replace(
    GLM_4_5,
    template="[gMASK]<sop>" + NEWEST + "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>"
    "{% if m.reasoning_content and loop.index0 > ns.newest %}{{ '<think>' + m.reasoning_content }}{% endif %}</think>"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}</tool_call>{% endfor %}{% elif m.role == 'tool' %}<|observation|>"
    "{{ m.content }}{% else %}<|{{ m.role }}|>{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}"
    "<|assistant|>{{ '</think>' if enable_thinking is defined and not enable_thinking else '<think>' }}{% endif %}",
    call='<tool_call>look{"at": "sea"}</tool_call><|observation|>',
    reasoned="WHY</think>",
    bare=("<think>", "</think>"),
)

# A final answer loses its reasoning for an empty one; turns that call tools keep theirs.
KIMI_K2 = Family(
    "{% set ns = namespace(final=-1) %}{% for m in messages %}{% if m.role == 'assistant' and not m.tool_calls %}"
    "{% set ns.final = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}<|im_{{ m.role }}|>{{ m.role }}"
    "<|im_middle|>{% if m.role == 'assistant' %}"
    "{{ '<think>' + (m.reasoning_content or '' if loop.index0 > ns.final else '') + '</think>' }}{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<|call|>{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "<|called|>{% endfor %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>"
    "{% endif %}",
    tokens="<|im_end|>, <|im_assistant|> <|im_user|> <|im_system|> <|im_tool|> <|im_middle|> <|call|> <|called|>",
    call='<|call|>look{"at": "sea"}<|called|><|im_end|>',
    reasoned="<think>WHY</think>",
    bare=("", "<think></think>"),
)
KIMI_K2_OPENED = replace(
    KIMI_K2,
    template=KIMI_K2.template.replace("assistant<|im_middle|>{% endif %}", "assistant<|im_middle|><think>{% endif %}"),
    reasoned="WHY</think>",
    bare=("", "</think>"),
)

# Prompts that ask for no reasoning end in an empty channel, which no turn has; calls stand before the text.
GEMMA_4 = Family(
    "{{ bos_token }}{% if enable_thinking %}<|turn>system\n<|think|><turn|>\n{% endif %}{% for m in messages %}<|turn>"
    "{{ 'model' if m.role == 'assistant' else m.role }}\n{% for c in m.tool_calls or [] %}{% if m.reasoning_content %}"
    "{{ '<|channel>thought\n' + m.reasoning_content + '\n<channel|>' }}{% endif %}<|tool_call>{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}<tool_call|>{% endfor %}{{ m.content }}<turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn>model\n{% if not enable_thinking %}<|channel>thought\n<channel|>"
    "{% endif %}{% endif %}",
    tokens="<turn|>, <|turn> <|channel> <channel|> <|think|> <|tool_call> <tool_call|>",
    call='<|tool_call>look{"at": "sea"}<tool_call|><turn|>',
    asks_for_none=True,
)
GEMMA_4_THINKING = replace(
    GEMMA_4,
    asks_for_none=False,
    arguments={"enable_thinking": True},
    reasoned="<|channel>thought\nWHY\n<channel|>",
)
# The results of tools stand in the turn that calls them, before its text, and only prompts go on after them without a
# header. No turn has reasoning.
GEMMA_4_JOINED = replace(
    GEMMA_4,
    template="{{ bos_token }}{% for m in messages %}{% if m.role != 'tool' %}{% set ns = namespace(last='', told='') %}"
    "{% for n in messages[:loop.index0] if n.role != 'tool' %}{% set ns.last = n.role %}{% endfor %}"
    "{% if m.role == 'user' or m.content or not ns.told %}<|turn>{{ 'model' if m.role == 'assistant' else 'user' }}\n"
    "{% endif %}"
    "{% for c in m.tool_calls or [] %}<|tool_call>{{ c.function.name }}{{ c.function.arguments | tojson }}<tool_call|>"
    "{% for n in messages if n.role == 'tool' %}{% set ns.told = n.content + '<tool_response|>' %}{% endfor %}"
    "<|tool_response>{{ ns.told }}{% endfor %}{{ m.content }}{% if m.content or not m.tool_calls %}<turn|>\n{% endif %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{% if messages[-1].role != 'tool' or messages[-2].content %}"
    "<|turn>model\n{% endif %}{% if not enable_thinking %}<|channel>thought\n<channel|>{% endif %}{% endif %}",
    tokens=GEMMA_4.tokens.replace(",", " <|tool_response>,") + " <tool_response|>",
    call='<|tool_call>look{"at": "sea"}<tool_call|><|tool_response>',
)

# The target writes to whom it speaks: to itself, to the user, or to a tool.
MUSE_GLIMMER = Family(
    "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.reasoning_content and loop.last %}"
    "<|start|>assistant to=self<|message|>{{ m.reasoning_content }}<|eom|>{% endif %}<|start|>assistant to="
    "{% if m.tool_calls %}look<|message|>{{ m.tool_calls[0].function.arguments | tojson }}"
    "{{ m.tool_calls[0].function.name }}{% else %}user<|message|>{{ m.content }}{% endif %}<|eot|>{% else %}<|start|>"
    "{{ m.role }}<|message|>{{ m.content }}<|eot|>{% endif %}{% endfor %}{% if add_generation_prompt %}"
    "<|start|>assistant{% endif %}",
    tokens="<|eot|>, <|start|> <|message|> <|eom|>",
    answer=" to=user<|message|>{}<|eot|>",
    call=' to=look<|message|>{"at": "sea"}look<|eot|>',
    reasoned=" to=self<|message|>WHY<|eom|><|start|>assistant",
)

# Reasoning is text of the answer.
SMOLLM_3 = Family(
    "<|im_start|>system\nReasoning Mode: "
    "{{ '/no_think' if enable_thinking is defined and not enable_thinking else '/think' }}<|im_end|>\n"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n"
    "{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n{% endif %}{% endif %}",
    tokens="<|im_end|>, <|im_start|>",
)
# The reasoning of turns after the newest question is read under another name, and older answers lose it.
LFM_2_5 = Family(
    "{{ bos_token }}" + NEWEST + "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% if m.thinking is defined and loop.index0 > ns.newest %}{{ '<think>' + m.thinking + '</think>' }}{% endif %}"
    "{{ m.content if loop.index0 > ns.newest else m.content.split('</think>')[-1] }}{% for c in m.tool_calls or [] %}"
    "<|tool_call_start|>{{ c.function.name }}({{ c.function.arguments | tojson }})<|tool_call_end|>{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    tokens="<|im_end|>, <|im_start|> <|tool_call_start|> <|tool_call_end|>",
    call='<|tool_call_start|>look({"at": "sea"})<|tool_call_end|><|im_end|>',
    reasoned="<think>WHY</think>",
)
GRANITE = Family(
    "{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"
    "<|end_of_text|>\n{% endfor %}{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}",
    tokens="<|end_of_text|>, <|start_of_role|> <|end_of_role|>",
    call='<tool_call>\n{"name": "look", "arguments": {"at": "sea"}}\n</tool_call><|end_of_text|>',
)

# The prompt asks for none by a block that has text.
SEED_OSS = Family(
    "{% for m in messages %}<bos>{{ m.role }}\n{% if m.role == 'assistant' and m.reasoning_content and loop.last %}"
    "<seed:think>{{ m.reasoning_content }}</seed:think>{% endif %}{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant\n{% if thinking_budget == 0 %}<seed:think>no budget</seed:think>"
    "{% endif %}{% endif %}",
    tokens="<eos>",
    reasoned="<seed:think>WHY</seed:think>",
)
SEED_OSS_NOT_THINKING = without_reasoning(SEED_OSS, thinking_budget=0)
# Reasoning is a part of the content.
MINISTRAL = Family(
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.role == 'system' %}{{ m.content }}{% else %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text if p.type == 'text' else '[THINK]' + p.thinking + '[/THINK]' }}{% endfor %}"
    "{% endif %}{{ eos_token }}{% endif %}{% endfor %}",
    tokens="</s>, [INST] [/INST] [THINK] [/THINK]",
    reasoned="[THINK]WHY[/THINK]",
)

# The prompt opens a reasoning, or closes it to ask for none; tokens stand around a text, and it has none beside calls.
COHERE_2_MOE = Family(
    "{{ bos_token }}{% for m in messages %}<|START|>{% if m.role != 'assistant' %}<|{{ m.role }}|><|TEXT|>"
    "{{ m.content }}<|END_TEXT|>{% else %}<|CHATBOT|>{% if m.reasoning_content %}<|THINK|>{{ m.reasoning_content }}"
    "<|END_THINK|>"
    "{% endif %}{% if m.tool_calls %}<|ACTION|>{{ m.tool_calls[0].function | tojson }}<|END_ACTION|>{% else %}<|TEXT|>"
    "{{ m.content }}<|END_TEXT|>{% endif %}{% endif %}<|END|>{% endfor %}{% if add_generation_prompt %}<|START|>"
    "<|CHATBOT|><|THINK|>{% if reasoning is defined and not reasoning %}<|END_THINK|>{% endif %}{% endif %}",
    tokens="<|END|>, <|START|> <|CHATBOT|> <|TEXT|> <|END_TEXT|> <|THINK|> <|END_THINK|> <|ACTION|> <|END_ACTION|>",
    answer="<|TEXT|>{}<|END_TEXT|><|END|>",
    call='<|ACTION|>{"name": "look", "arguments": {"at": "sea"}}<|END_ACTION|><|END|>',
    reasoned="WHY<|END_THINK|>",
    bare=("<|THINK|>", ""),
)
COHERE_2_MOE_NOT_THINKING = without_reasoning(COHERE_2_MOE, reasoning=False)
# The results of tools stand in the turn that calls them, which prompts open once more; no token ends the last answer.
APERTUS = Family(
    "{{ bos_token }}{% set ns = namespace(opened=false) %}{% for m in messages %}{% if m.role == 'tool' %}"
    "[{{ m.content }}]{% elif m.role == 'assistant' %}{{ '<|assistant|>' if not ns.opened }}{% set ns.opened = true %}"
    "{{ m.content }}{% if m.tool_calls %}<|calls|>{{ m.tool_calls[0].function | tojson }}<|called|>{% endif %}"
    "{% else %}{{ '<|assistant_end|>' if ns.opened }}{% set ns.opened = false %}<|{{ m.role }}|>{{ m.content }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
    tokens="<|assistant_end|> <|called|>, <|user|> <|system|> <|assistant|> <|calls|>",
    call='<|calls|>{"name": "look", "arguments": {"at": "sea"}}<|called|>',
)
# Prompts open a reasoning, which an answer's text goes on in, and calls do not have.
NEMOTRON_NANO_2 = Family(
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n{{ '<think>\n' if m.content and loop.last and"
    " m.role == 'assistant' }}{{ m.content }}{% for c in m.tool_calls or [] %}<TOOLCALL>{{ c.function | tojson }}"
    "</TOOLCALL>{% endfor %}{{ '<|end|>\n' if m.role == 'assistant' else '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n<think>\n{% endif %}",
    tokens="<|end|>, <|user|> <|system|> <|assistant|> <|tool|>",
    call='<TOOLCALL>{"name": "look", "arguments": {"at": "sea"}}</TOOLCALL><|end|>',
    reasoned="WHY\n</think>\n\n",
    bare_call=("<think>\n", ""),
)

FAMILIES = {name: value for name, value in dict(globals()).items() if isinstance(value, Family)}

CALL = {"id": "call_00001", "type": "function", "function": {"name": "look", "arguments": {"at": "sea"}}}
TURNS: list[Message] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "the sea"},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": "a <b>beach</b>"},
]
REASONED = [m if m["role"] == "user" else m | {"reasoning_content": f"so {n}, hi"} for n, m in enumerate(TURNS)]
IN_TEXT = [
    m if m["role"] == "user" else {**t, "content": f"<think>\n{m['reasoning_content']}\n</think>\n\n{t['content']}"}
    for t, m in zip(TURNS, REASONED, strict=True)
]
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
    "reasoning in the text": IN_TEXT,
}


@cache
def template_of(name: str) -> ChatTemplate:
    """A family's template, with a tokenizer whose tokens are bytes and the family's special tokens."""
    family = FAMILIES[name]
    alphabet = {letter: n for n, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bytes_alone = Tokenizer(models.BPE(alphabet, []))
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone.decoder = decoders.ByteLevel()
    specials = [*family.tokens.replace(",", "").split(), "<bos>"]
    bytes_alone.add_special_tokens([AddedToken(text, special=True, rstrip=family.strips) for text in specials])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_alone, bos_token="<bos>", eos_token=family.ends[0])
    tokenizer.chat_template = family.template
    end_ids: Any = tokenizer.convert_tokens_to_ids(family.ends)
    return ChatTemplate(tokenizer, arguments=family.arguments, end_ids=end_ids)


def written(family: Family, message: Message) -> str | None:
    if "tool_calls" in message:
        return family.call
    answer = (family.answer or "{}" + family.ends[0]).format(message["content"])
    if "reasoning_content" not in message:
        return answer
    return None if family.reasoned is None else family.reasoned.replace("WHY", message["reasoning_content"]) + answer


def renders(family: Family, messages: list[Message]) -> bool:
    if messages is IN_TEXT and family.asks_for_none:
        return False
    return all(written(family, message) is not None for message in messages if message["role"] == "assistant")


CONVERSATIONS = pytest.mark.parametrize(
    ("name", "case"), [(name, case) for name in FAMILIES for case in CASES if renders(FAMILIES[name], CASES[case])]
)


@CONVERSATIONS
def test_labels_are_what_the_target_writes_after_the_prompt_as_served(name: str, case: str) -> None:
    family, template, messages = FAMILIES[name], template_of(name), CASES[case]
    tokenizer = template.tokenizer
    answers = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    as_read = REASONED if messages is IN_TEXT and family.reasoned else messages
    expected: list[tuple[Any, ...]] = []
    for n in answers:
        prompt = template.render(template.prepared(as_read[:n], place=""), place="", answer_next=True)
        opened, empty = max(family.bare, family.bare_call if "tool_calls" in as_read[n] else family.bare)
        if "reasoning_content" not in as_read[n] and prompt.endswith(opened):
            prompt = prompt.removesuffix(opened) + empty
        expected.append(tuple(tokenizer([prompt, str(written(family, as_read[n]))])["input_ids"]))

    (documents,) = encode_conversations(template, [read_conversation(template, messages, place="f:1")[0]])
    found: list[tuple[Any, ...]] = []
    for document in documents:
        at = 0
        for is_label, run in groupby(document.labels.tolist()):
            end = at + len(list(run))
            if is_label:
                found.append((document.ids[:at].tolist(), document.ids[at:end].tolist()))
            at = end
    readable = [[tuple(map(tokenizer.decode, pair)) for pair in pairs] for pairs in (found, expected)]
    assert readable[0] == readable[1] and found == expected


@CONVERSATIONS
def test_rendered_text_has_the_labels_of_its_conversation(name: str, case: str) -> None:
    template, messages = template_of(name), CASES[case]
    (first, *others), _ = read_conversation(template, messages, place="f:1")
    text = template.render(template.prepared(messages, place=""), place="")
    if others or not text.startswith(first.text):
        return  # the template rewrites turns, and no text has the labels of all answers
    assert template.has_rendered(text)
    answers = first.answers
    if name in ("MISTRAL", "DEEPSEEK_R1", "DEEPSEEK_V3_2"):
        answers = answers[: 1 if messages is CALLED else None]  # nothing marks one straight after a tool's result
    assert read_rendered(template, text).answers == answers


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_is_given_back_as_a_server_with_a_reasoning_parser_gives_it(name: str) -> None:
    family, template = FAMILIES[name], template_of(name)

    def prompt(*messages: Message) -> str:
        return template.render(messages, place="", answer_next=True)

    first, next_turn = prompt(TURNS[0]), TURNS[2]
    is_opened = first.rstrip().endswith(("<think>", "<|THINK|>"))
    for message in REASONED[1:2] * bool(family.reasoned) + TURNS[1:2] * (not is_opened):
        turn = template.turn(first, template.tokenizer(written(family, message))["input_ids"])
        assert blank(prompt(TURNS[0], turn, next_turn)) == blank(prompt(TURNS[0], message, next_turn))
        assert {key: text.strip() for key, text in turn.items()} == message
    if is_opened:  # and not closed: it was cut while it thought
        turn = template.turn(first, template.tokenizer("the sea")["input_ids"])
        assert turn == {"role": "assistant", "content": "", "reasoning_content": "the sea"}


@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name].asks_for_none])
@pytest.mark.parametrize("messages", [REASONED, IN_TEXT])
def test_reasoning_where_the_prompt_asks_for_none_is_refused(name: str, messages: list[Message]) -> None:
    with pytest.raises(RecordError, match=r"turn 2 has reasoning, .* asks for none; set data\.template\.\w+ to \w+"):
        read_conversation(template_of(name), messages, place="f:1")


@pytest.mark.parametrize("name", ["LLAMA_3", "SMOLLM_3"])
def test_tags_that_the_template_does_not_know_are_text_of_the_answer(name: str) -> None:
    assert TAGGED in read_conversation(template_of(name), IN_TEXT, place="f:1")[1]
    assert TAGGED not in read_conversation(template_of(name), TURNS, place="f:1")[1]


def test_an_answer_whose_text_beside_a_call_the_template_drops_is_context() -> None:
    template = template_of("COHERE_2_MOE")
    beside: list[Message] = [CALLED[0], {**CALLED[1], "content": "let me look"}, *CALLED[2:]]
    (rendered,), notes = read_conversation(template, beside, place="f:1")
    assert [rendered.text[start:end] for start, end in rendered.answers] == ["<|TEXT|>the sea<|END_TEXT|><|END|>"]
    assert BESIDE_CALL in notes and rendered.text == read_conversation(template, CALLED, place="f:1")[0][0].text
    template.prompt(beside[:3], place="f:1")  # as a server renders it
    with pytest.raises(RecordError, match=r"leaves out the text of turn 2 \(assistant, 'let me look'\)"):
        read_conversation(template, beside[:2], place="f:1")
    thinking: list[Message] = [CALLED[0], {**beside[1], "reasoning_content": "so"}, *CALLED[2:]]
    with pytest.raises(RecordError, match="asks for none"):  # and not for its text
        read_conversation(template_of("COHERE_2_MOE_NOT_THINKING"), thinking, place="f:1")
