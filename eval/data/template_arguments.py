"""The arguments of a chat template, such as enable_thinking."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from jinja2 import Environment, TemplateSyntaxError, meta

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATION = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
"""Tags that some templates have around the model's output, and that Jinja does not know. Labels do not use them,
because they often include the beginning of an answer that is already part of the prompt."""
GIVEN = frozenset({"messages", "tools", "documents", "add_generation_prompt", "strftime_now", "raise_exception"})
"""Names that a template reads but that are not arguments of a user."""


def arguments_read(template: str | Mapping[str, str], tokenizer: PreTrainedTokenizerBase) -> list[str] | None:
    """Return the names that a template (or any template of a mapping) reads but does not set, or None if it cannot be
    parsed."""
    texts: Iterable[str] = [template] if isinstance(template, str) else template.values()
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        trees = [environment.parse(GENERATION.sub("", text)) for text in texts]
    except TemplateSyntaxError:
        return None
    known = frozenset[str]().union(*(meta.find_undeclared_variables(tree) for tree in trees))
    return sorted(known - GIVEN - tokenizer.special_tokens_map.keys())


def with_arguments(tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, object]) -> PreTrainedTokenizerBase:
    """Return the tokenizer with the arguments that its chat template reads set in the template, so that prompts are
    rendered like the training data. An argument that a prompt is rendered with takes precedence."""
    template = tokenizer.chat_template
    known = None if template is None else arguments_read(template, tokenizer)
    read = {name: value for name, value in arguments.items() if name in (known or ())}
    if not read:
        return tokenizer
    settings = "".join(
        f"{{%- if {name} is not defined -%}}{{%- set {name} = {json.dumps(value)} -%}}{{%- endif -%}}"
        for name, value in read.items()
    )
    twin = copy.copy(tokenizer)
    twin.chat_template = (
        {name: settings + text for name, text in template.items()}
        if isinstance(template, dict)
        else settings + template
    )
    return twin
