"""Conversations put to the target turn by turn, on its own answers, and the documents that they make."""

import copy
from typing import Any

from transformers import PreTrainedTokenizerBase

from eval.data.chat_template import ChatTemplate
from eval.data.conversation_forms import Chat
from eval.data.data_files import Message
from tests.support.chats import bracketed, talk
from train.data.chats import join_texts
from train.data.chats import token_ids as ids
from train.data.corpus import Document
from train.data.dialogues import ChatDialogue, Dialogue

CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
CHAT = talk("one", "as recorded", "two", "as recorded")
FORGETFUL = (  # past answers lose what is before the bar, as reasoning is lost
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content.split('|')[-1] }}"
    "{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def begin(template: ChatTemplate, messages: list[Message] = CHAT, limit: int = 100, **settings: bool) -> ChatDialogue:
    return ChatDialogue(template, Chat(messages, None, "", ()), "x", limit, **settings)


def converse(
    tokenizer: PreTrainedTokenizerBase, answers: list[str], *chat: Any, template: str | None = None, **settings: Any
) -> tuple[list[str], Dialogue]:
    """The prompts that a conversation gives, where the answers are these."""
    dialogue = begin(ChatTemplate(tokenizer, template), *chat, **settings)
    prompts: list[str] = []
    for answer in answers:
        if dialogue.prompt is not None:
            prompts.append(str(tokenizer.decode(dialogue.prompt, clean_up_tokenization_spaces=False)))
            dialogue.answer(ids(tokenizer, answer))
    assert dialogue.prompt is None
    return prompts, dialogue


def joined(dialogue: Dialogue) -> list[Document]:
    return join_texts((len(prompt), [*prompt, *answer]) for prompt, answer in dialogue.exchanges)


def documents(tokenizer: PreTrainedTokenizerBase, dialogue: Dialogue) -> list[str]:
    return bracketed(tokenizer, joined(dialogue))


def test_each_turn_stands_on_the_targets_own_answers(tokenizer: PreTrainedTokenizerBase) -> None:
    prompts, dialogue = converse(tokenizer, ["so</s>", "it is</s>"])
    assert prompts == ["<s><|user|>one<|assistant|>", "<s><|user|>one<|assistant|>so</s><|user|>two<|assistant|>"]
    assert documents(tokenizer, dialogue) == ["<s><|user|>one<|assistant|>[so</s>]<|user|>two<|assistant|>[it is</s>]"]
    assert dialogue.cut is None
    _, dialogue = converse(tokenizer, ["so", "it is</s>"])  # cut short before the end of its turn
    assert documents(tokenizer, dialogue) == ["<s><|user|>one<|assistant|>[so]</s><|user|>two<|assistant|>[it is</s>]"]


def test_a_template_that_rewrites_answers_gives_each_a_document(tokenizer: PreTrainedTokenizerBase) -> None:
    _, dialogue = converse(tokenizer, ["why|so</s>", "it is</s>"], template=FORGETFUL)
    assert documents(tokenizer, dialogue) == [
        "<|user|>one<|assistant|>[why|so</s>]",
        "<|user|>one<|assistant|>so</s><|user|>two<|assistant|>[it is</s>]",
    ]


def test_an_answer_that_is_tokenised_otherwise_keeps_its_own_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    """As where a model writes a word in two tokens: the next prompt begins anew with the tokenizer's."""
    dialogue = begin(ChatTemplate(tokenizer))
    written = [*ids(tokenizer, "t"), *ids(tokenizer, "h"), tokenizer.eos_token_id]
    assert written[:2] != ids(tokenizer, "th")
    dialogue.answer(written)
    dialogue.answer(ids(tokenizer, "so</s>"))
    first, second = joined(dialogue)
    assert first.ids[first.labels].tolist() == written
    assert second.ids[second.labels].tolist() == ids(tokenizer, "so</s>")


def test_an_answer_that_goes_through_text_comes_back(tokenizer: PreTrainedTokenizerBase) -> None:
    """Llama 3's tokenizers, among others, ask for a clean-up of spaces."""
    cleaning: Any = copy.deepcopy(tokenizer)
    cleaning.clean_up_tokenization_spaces = True
    cleaning.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    said = "a != b ? yes , sure ."
    assert cleaning.decode(ids(cleaning, said)) != said
    prompts, dialogue = converse(cleaning, [f"{said}</s>", "so</s>"])
    assert prompts[1] == f"<s><|user|>one<|assistant|>{said}</s><|user|>two<|assistant|>"
    assert len(joined(dialogue)) == 1


def test_an_answer_ends_at_a_token_that_is_not_special(tokenizer: PreTrainedTokenizerBase) -> None:
    ends = ids(tokenizer, "!")
    dialogue = begin(ChatTemplate(tokenizer, end_ids=ends))
    dialogue.answer([*ids(tokenizer, "so"), *ends])
    assert dialogue.prompt == ids(tokenizer, "<s><|user|>one<|assistant|>so</s><|user|>two<|assistant|>")


def test_a_conversation_ends_where_it_cannot_go_on(tokenizer: PreTrainedTokenizerBase) -> None:
    prompts, dialogue = converse(tokenizer, ["so</s>"], limit=10)
    assert len(prompts) == 1 and dialogue.cut == "a prompt of more than 10 tokens"
    assert converse(tokenizer, [], limit=3)[1].exchanges == []
    _, dialogue = converse(tokenizer, ["s<|user|>o</s>"])
    assert len(dialogue.exchanges) == 1 and dialogue.cut == "a turn on an answer with special tokens"


def test_the_last_answer_alone_stands_on_the_record(tokenizer: PreTrainedTokenizerBase) -> None:
    prompts, dialogue = converse(tokenizer, ["so</s>"], last_only=True)
    assert prompts == ["<s><|user|>one<|assistant|>as recorded</s><|user|>two<|assistant|>"]
    messages = dialogue.record()["messages"]
    assert messages == [CHAT[0], {**CHAT[1], "weight": 0}, CHAT[2], {"role": "assistant", "content": "so"}]


def test_calls_of_tools_stay_as_they_are(tokenizer: PreTrainedTokenizerBase) -> None:
    template = FORGETFUL.replace(
        "m.content.split('|')[-1]", "m.content + (m.tool_calls[0].function.name if m.tool_calls else '')"
    )
    chat = [CHAT[0], CALL, {"role": "tool", "content": "3"}, CHAT[1]]
    prompts, _ = converse(tokenizer, ["so</s>"], chat, template=template)
    assert prompts == ["<|user|>one<|assistant|>f</s><|tool|>3<|assistant|>"]
    prompts, _ = converse(tokenizer, ["so</s>"], chat[:3], template=template, last_only=True, calls=True)
    assert prompts == ["<|user|>one<|assistant|>"]


def test_answers_of_weight_0_stay_as_they_are(tokenizer: PreTrainedTokenizerBase) -> None:
    unweighted = {**CHAT[1], "weight": 0}
    prompts, _ = converse(tokenizer, ["so</s>"], [CHAT[0], unweighted, *CHAT[2:]])
    assert prompts == ["<s><|user|>one<|assistant|>as recorded</s><|user|>two<|assistant|>"]
    prompts, _ = converse(tokenizer, ["so</s>"], [*CHAT[:3], unweighted], last_only=True)
    assert prompts == ["<s><|user|>one<|assistant|>"]


def test_prompts_are_labels_where_they_are_asked_for() -> None:
    (document,) = join_texts([(2, [1, 2, 3]), (4, [1, 2, 3, 4, 5])], train_on_prompts=True)
    assert document.ids.tolist() == [1, 2, 3, 4, 5] and document.labels.all()
