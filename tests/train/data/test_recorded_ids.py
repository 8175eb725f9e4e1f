"""Records with token ids: the labels are those ids and no others, whatever their text would be tokenised to."""

from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from eval.data.chat_template import ChatTemplate
from eval.data.data_files import RecordError
from train.data.chats import token_ids
from train.data.corpus import Document
from train.data.sources import ChatSource, TextSource


@pytest.fixture
def template(tokenizer: PreTrainedTokenizerBase) -> ChatTemplate:
    return ChatTemplate(tokenizer, vocab_size=128)


def letters(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The ids of a text letter by letter, as no tokenizer with merges writes it."""
    return [token for letter in text for token in token_ids(tokenizer, letter)]


def documents(template: ChatTemplate, fields: dict[str, Any], **settings: Any) -> list[Document]:
    source = ChatSource(kind="chat", path="x", **settings)
    return next(source.documents(template, [("x: record 1", fields)]))


def labelled(document: Document) -> list[int]:
    return document.ids[document.labels].tolist()  # type: ignore[no-any-return]


def test_ids_of_every_form_are_trained_on_as_they_are(template: ChatTemplate) -> None:
    prompt, answer, end = letters(template.tokenizer, "say the "), letters(template.tokenizer, "sea near"), [1]
    assert answer != token_ids(template.tokenizer, "sea near")  # tokenised again they would be others
    turns = [{"role": "user", "content": "say the"}, {"role": "assistant", "content": "sea near"}]
    whole, mask = [*prompt, *answer], [0] * len(prompt) + [1] * len(answer)
    labels, attended = [-100] * len(prompt) + answer, [0, *[1] * len(whole)]
    forms: dict[str, dict[str, Any]] = {
        "exchanges": {"exchanges": [[prompt, answer]]},
        "prompt_ids with completion_ids": {"prompt_ids": prompt, "completion_ids": answer},
        "input_ids with loss_mask": {"input_ids": whole, "loss_mask": mask},
        "input_ids with completion_mask": {"input_ids": whole, "completion_mask": mask},
        "input_ids with assistant_masks": {"input_ids": whole, "assistant_masks": mask},
        "input_ids with labels": {"input_ids": [0, *whole], "labels": [0, *labels], "attention_mask": attended},
        "input_ids with completion_mask with labels": {"input_ids": whole, "completion_mask": mask, "labels": whole},
    }
    for form, columns in forms.items():
        for beside in ({}, {"messages": turns}, {"prompt": "say the", "completion": "sea near"}):
            (document,) = documents(template, {**columns, **beside})
            assert (document.error, document.form, document.ids.tolist()) == ("", form, whole)
            assert labelled(document) == answer  # no end token: the answer was cut at its limit
    called = [*answer, *prompt, *answer]  # a call, its result, the answer
    masks = {"completion_mask": [1] * len(answer) + mask, "labels": [*answer, *labels]}
    for name, values in [*masks.items(), ("loss_mask", [*mask, *mask])]:
        columns = {"prompt_ids": prompt, "completion_ids": called, name: values}
        (document,) = documents(template, columns)
        assert labelled(document) == [*answer, *answer] and document.ids.tolist() == [*whole, *whole]
    second = [*whole, *end, *prompt]
    several = {"exchanges": [[prompt, [*answer, *end]], [second, answer]]}
    (both,) = documents(template, several)
    assert labelled(both) == [*answer, *end, *answer] and both.ids.tolist() == [*second, *answer]
    (last,) = documents(template, several, answers="last")
    assert labelled(last) == answer and last.ids.tolist() == [*second, *answer]
    text = TextSource(kind="text", path="x")
    (document,) = next(text.documents(template, [("x: record 1", {"text": "say the sea near", **forms["exchanges"]})]))
    assert labelled(document) == answer and document.form == "exchanges"


def test_the_documents_of_a_packed_row_are_trained_on_apart(template: ChatTemplate) -> None:
    row = {"input_ids": [5, 6, 7, 8, 9, 0], "labels": [-100, 6, -100, -100, 9, -100]}
    attended = {"attention_mask": [1, 1, 1, 1, 1, 0]}
    for packed in ({"position_ids": [0, 1, 0, 1, 2, 0], **attended}, {"seq_lengths": [2, 3, 1]}):
        for answers in ("all", "last"):
            found = documents(template, {**row, **packed}, answers=answers)
            assert [document.ids.tolist() for document in found] == [[5, 6], [7, 8, 9]]
            assert [labelled(document) for document in found] == [[6], [9]]
    (after_one,) = documents(template, {"input_ids": [5, 6, 7], "labels": [-100, -100, 7], "position_ids": [0, 0, 1]})
    assert after_one.ids.tolist() == [6, 7]
    (whole,) = documents(template, {**row, "position_ids": [[0, 1, 0, 1, 2, 0]] * 3})  # of images
    assert labelled(whole) == [6, 9]


FAULTS: dict[str, dict[str, Any]] = {
    r"exchanges\[0\]: expected a pair of prompt ids and answer ids, got \[5\]": {"exchanges": [[5]]},
    r"exchanges\[0\]\[1\]: expected a list of whole numbers, got 'sea'": {"exchanges": [[[5], "sea"]]},
    r"completion_ids: expected ids from 0 to 127, .* got 128": {"prompt_ids": [5], "completion_ids": [128]},
    r"prompt_ids: expected a list of whole numbers, got None": {"completion_ids": [5]},
    r"loss_mask: expected 3 values, as input_ids has, got 2": {"input_ids": [5, 6, 7], "loss_mask": [0, 1]},
    r"loss_mask: expected 0 or 1 for each token, got \[0, 2\]": {"input_ids": [5, 6], "loss_mask": [0, 2]},
    r"labels: expected -100 or the id of input_ids in each place": {"input_ids": [5, 6], "labels": [6, 7]},
    r"seq_lengths: expected lengths whose sum is 2, as input_ids has, got \[3\]": {
        "input_ids": [5, 6],
        "loss_mask": [0, 1],
        "seq_lengths": [3],
    },
    r"input_ids with loss_mask: expected a label, got none": {"input_ids": [5, 6], "loss_mask": [0, 0]},
    "its label says that its answer is bad": {"prompt_ids": [5], "completion_ids": [6], "label": False},
    r"expected labels for 1 answers, got 2: others have weight 0": {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b", "weight": 0},
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
        ],
        "exchanges": [[[5], [6]], [[5, 6, 5], [6]]],
    },
    r"expected its token ids to spell the text 'the sea', got ": {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "the sea"}],
        "exchanges": [[[5], [6]]],
    },
}


@pytest.mark.parametrize("fault", FAULTS)
def test_ids_that_fit_nothing_are_named(fault: str, template: ChatTemplate) -> None:
    (skipped,) = documents(template, FAULTS[fault])
    assert skipped.reason and len(skipped.ids) == 0
    with pytest.raises(RecordError, match=fault):
        raise RecordError(skipped.error, skipped.reason)


def test_a_text_that_was_cut_teaches_no_end(template: ChatTemplate) -> None:
    turns = [{"role": "user", "content": "say"}, {"role": "assistant", "content": "the sea"}]
    (ended,) = documents(template, {"messages": turns})
    why = {"finish_reason": "length"}
    for cut in ({"messages": turns, **why}, {"messages": [turns[0], {**turns[1], **why}]}):
        (document,) = documents(template, cut)
        assert labelled(document) == labelled(ended)[:-1] and labelled(ended)[-1] in template.all_end_ids
        assert np.array_equal(document.ids, ended.ids[: len(document.ids)])
