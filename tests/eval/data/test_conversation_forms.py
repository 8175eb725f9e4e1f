"""Records as the projects that train on them have them, and the conversations that they are.

`CASES` is a table by the name of the form: the record, its turns, and the columns that are not read.
"""

import json
from typing import Any

import pytest

from eval.data.conversation_forms import Chat, read_chat
from eval.data.data_files import RecordError

U, A = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}
HUMAN, GPT = {"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}
TALK = "user hi, assistant ho"
BE = {"from": "system", "value": "be"}
LOOK = '{"name": "look", "arguments": {"at": "sea"}}'
HERMES = f"<tool_call>{LOOK}</tool_call>"  # which stays text
CALL = "look({'at': 'sea'})"
CALLED = {"type": "function", "function": json.loads(LOOK)}
NOTHING: list[Any] = ["", "[]", "null", []]
PREFERRED: dict[str, Any] = {"input": {"messages": [U]}, "preferred_output": [A]}
PAST: dict[str, Any] = {"system": "be", "history": [["hi", "ho"]]}
SEEN = {"from": "observation", "value": "3"}
FUNCTION = {"name": "look", "arguments": "{}"}
TOOL = {"name": "look", "parameters": {}}


def calls(text: str) -> dict[str, str]:
    return {"from": "function_call", "value": text}


CASES: dict[str, list[tuple[dict[str, Any], str, str]]] = {
    # OpenAI, TRL, SmolTalk, UltraChat's 200k
    "messages": [
        ({"messages": [U, A], "source": "x"}, TALK, "source"),
        ({"prompt": "hi", "prompt_id": "7", "messages": [U, A]}, TALK, "prompt prompt_id"),
        ({"messages": [{"role": "developer", "content": "be"}, U, A]}, f"system be, {TALK}", ""),
        ({"messages": [U, {**A, "content": None, "function_call": FUNCTION}]}, "user hi, assistant look({})", ""),
        ({"messages": [{**U, "content": ["hi", {"type": "text", "text": ","}]}, A]}, "user hi,, assistant ho", ""),
        ({"prompt": "hi", "chosen": [U, A], "rejected": [U, U], "messages": [U, A]}, TALK, "rejected"),
        ({"messages": [{**U, "role": "Human"}, {**A, "role": "AI"}]}, TALK, ""),
        ({"messages": [{**U, "role": "<|USER|>"}, {**A, "role": "Bot:"}]}, TALK, ""),
        ({"messages": {"role": ["user", "assistant"], "content": ["hi", "ho"]}}, TALK, ""),
        ({"messages": [U, {**A, "content": {"at": 1}}]}, 'user hi, assistant {"at": 1}', ""),
        ({"messages": json.dumps([U, A])}, TALK, ""),
        *(
            ({"messages": [U, {**A, "content": None, "tool_calls": calls}]}, f"user hi, assistant {said}", "")
            for calls, said in ((json.dumps([CALLED]), CALL), (json.dumps(CALLED), CALL), ([json.dumps(CALLED)], CALL))
        ),
        *(({"messages": [U, {**A, "tool_calls": nothing}]}, TALK, "") for nothing in NOTHING),
    ],
    "input, preferred_output": [(PREFERRED | {"non_preferred_output": [U]}, TALK, "non_preferred_output")],
    # FastChat, SlimOrca, LLaMA-Factory, Hermes
    "conversations": [
        ({"id": "1", "conversations": [HUMAN, GPT]}, TALK, "id"),
        ({"conversations": [HUMAN, GPT], "system": "be"}, f"system be, {TALK}", ""),
        ({"conversations": [BE, HUMAN, GPT], "system_prompt": "be"}, f"system be, {TALK}", ""),
        ({"conversations": [BE, GPT, GPT, HUMAN, GPT]}, f"system be, {TALK}", ""),
        ({"conversations": [HUMAN, calls(LOOK), SEEN, GPT]}, f"user hi, assistant {CALL}, tool 3, assistant ho", ""),
        ({"conversations": [HUMAN, calls(f"<a>so</a>\n{LOOK}")]}, f"user hi, assistant <a>so</a>{CALL}", ""),
        ({"conversations": [HUMAN, {**GPT, "value": HERMES}], "id": "1"}, f"user hi, assistant {HERMES}", "id"),
        ({"instruction": "hi", "response": "ho", "conversations": [HUMAN, GPT] * 2}, f"{TALK}, {TALK}", ""),
    ],
    "conversations, chosen": [({"conversations": [HUMAN], "chosen": GPT, "rejected": HUMAN}, TALK, "rejected")],
    "conversation": [({"conversation": [U, A], "model": "x"}, TALK, "model")],
    "data": [({"id": "0", "data": ["hi", "ho", "and", "no"]}, f"{TALK}, user and, assistant no", "id")],
    "instruction, output": [
        (
            PAST | {"instruction": "So?", "input": "", "output": "no"},
            f"system be, {TALK}, user So?, assistant no",
            "",
        ),
        ({"instruction": "Add", "input": "2", "output": "4"}, "user Add\n\n2, assistant 4", ""),
    ],
    "question, response": [({"system_prompt": "be", "question": "hi", "response": "ho"}, f"system be, {TALK}", "")],
    # Dolly
    "instruction, response": [
        ({"instruction": "hi", "context": "x", "response": "ho"}, "user hi\n\nx, assistant ho", ""),
        ({"instruction": "hi", "response": "ho", "data": "[1]", "conversation": "y"}, TALK, "data conversation"),
    ],
    "question, answer": [
        ({"question": "hi", "reasoning": "so", "answer": "ho"}, TALK, ""),
        ({"question": "hi", "answer": "ho", "answers": '["ho", "hey"]'}, TALK, "answers"),
        ({"messages": None, "conversations": [], "prompt": "", "question": "hi", "answer": "ho"}, TALK, ""),
    ],
    "prompt, completion": [
        ({"prompt": "hi", "completion": "ho", "label": True}, TALK, ""),
        ({"prompt": [U], "completion": [A]}, TALK, ""),
        ({"prompt": [U], "input": "2", "completion": [A]}, TALK, "input"),
    ],
    # xLAM
    "query, completion": [({"query": "hi", "answers": f"[{LOOK}]", "tools": "[]"}, "user hi, assistant " + CALL, "")],
    "prompt, chosen": [({"prompt": [U], "chosen": [A], "rejected": [U]}, TALK, "rejected")],
    "chosen": [
        ({"chosen": [U, A], "rejected": [U, U]}, TALK, "rejected"),
        ({"chosen": "\n\nHuman: hi\n\nAssistant: ho", "rejected": "..."}, TALK, "rejected"),
    ],
}


def turns_of(chat: Chat) -> str:
    return ", ".join(
        f"{turn['role']} {turn['content']}"
        + "".join(f"{call['function']['name']}({call['function']['arguments']})" for call in turn.get("tool_calls", ()))
        for turn in chat.messages
    )


@pytest.mark.parametrize("form", CASES)
def test_the_forms_of_a_record(form: str) -> None:
    for record, turns, unread in CASES[form]:
        chat = read_chat(("f:1", record))
        assert (turns_of(chat), chat.form, " ".join(chat.unread)) == (turns, form, unread)
        leads = record.get("conversations", [])[:2] == [BE, GPT]
        assert chat.notes == (("records begin with an answer, which is dropped",) if leads else ())


def test_reasoning_in_a_column_or_in_a_content_part_is_that_of_its_answer() -> None:
    records: list[dict[str, Any]] = [{"question": "hi", "reasoning": "so", "answer": "ho"}]
    for thought in ("so", [{"type": "text", "text": "so"}]):
        parts = [{"type": "thinking", "thinking": thought}, {"type": "text", "text": "ho"}]
        records.append({"messages": [U, {**A, "content": parts}]})
    for record in records:
        assert read_chat(("f:1", record)).messages == [U, {**A, "reasoning_content": "so"}]


def test_questions_without_an_answer_between_them_are_one_prompt_which_is_said() -> None:
    (note,) = read_chat(("f:1", {"messages": [U, U, A]})).notes
    assert note == "records have turns of the user without an answer between them, which are one prompt"


def test_a_record_has_arguments_of_its_own_for_the_chat_template() -> None:
    for arguments in ({"calm": True}, '{"calm": true}'):
        record = {"messages": [U, A], "chat_template_kwargs": arguments}
        assert read_chat(("f:1", record)).arguments == {"calm": True}


TWO = "two that differ, in "
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"text": "x"}, "a record with 'messages', 'conversations', or 'instruction' with 'response', got keys text"),
    ({"messages": "hi"}, "messages: expected a list of turns, got 'hi'"),
    ({"messages": []}, "messages: expected a list of turns"),
    ({"messages": [U, A], "question": "hi", "answer": "no"}, f"{TWO}messages and in question with answer"),
    ({"question": "hi", "answer": "ho", "response": "no"}, f"{TWO}question with response and in question"),
    ({"messages": [U, A], "chosen": [U, {**A, "content": "no"}]}, f"{TWO}messages with chosen"),
    ({"prompt": "no", "chosen": [U, A]}, f"{TWO}prompt with chosen"),
    ({"messages": [{**U, "role": "system"}, U, A], "system": "be"}, f"one system prompt, got {TWO}system and"),
    ({"messages": [U, A], "system": "be", "system_prompt": "me"}, f"{TWO}system and in system_prompt"),
    ({"instruction": "hi", "output": "ho", "history": "hi"}, "history: expected a list of pairs of a question and its"),
    ({"instruction": "hi", "output": "ho", "history": [["hi"]]}, "history: expected a list of pairs"),
    ({"instruction": "hi", "output": "ho", "history": [U, A]}, "history: expected a list of pairs"),
    ({"prompt": "hi", "completion": "ho", "label": False}, "its label says that its answer is bad"),
    ({"messages": [U, {**A, "role": "boss"}]}, r"messages\[1\]: expected a role of user, assistant, system"),
    ({"messages": [U, {**A, "content": 3}]}, r"messages\[1\]: expected text, got 3"),
    ({"messages": [{**U, "content": ["a", {"type": "image"}]}, A]}, "content parts of type text, got type 'image'"),
    ({"messages": [{**U, "content": [{"type": "video"}]}, A]}, "content parts of type text, got type 'video'"),
    ({"conversations": [HUMAN, calls("look")]}, "expected a call as JSON with name and"),
    ({"messages": [U, {**A, "content": [{"type": "thinking", "thinking": "so"}]}]}, "got its reasoning alone"),
    ({"messages": [U, A], "chat_template_kwargs": "calm"}, "chat_template_kwargs: expected a mapping, or one as JSON"),
    ({"messages": [U, A], "tools": "look"}, "tools: expected a list, or one as JSON, got 'look'"),
    ({"messages": [U, A], "tools": TOOL}, "tools: expected a list, or one as JSON"),
]


@pytest.mark.parametrize(("record", "fault"), REFUSED)
def test_a_record_that_is_none_of_them_is_one_line(record: dict[str, Any], fault: str) -> None:
    with pytest.raises(RecordError, match=rf"^f:1: [^\n]*{fault}[^\n]*$") as error:
        read_chat(("f:1", record))
    assert error.value.reason


def test_tools_have_the_form_of_the_protocol() -> None:
    whole = {"type": "function", "function": TOOL}
    written = json.dumps([TOOL])
    for tools in ([TOOL], [whole], written, [written[1:-1]]):
        for column in ("tools", "functions", "tool_defs", "available_tools"):
            assert read_chat(("f:1", {"messages": [U, A], column: tools})).tools == [whole]
    for nothing in (*NOTHING, None):
        assert read_chat(("f:1", {"messages": [U, A], "tools": nothing})).tools is None
    preference = {"input": {"messages": [U], "tools": [whole]}, "preferred_output": [A]}
    assert read_chat(("f:1", preference)).tools == [whole]
    hermes = {"conversations": [{"from": "system", "value": "<tools>[]</tools>"}, HUMAN, GPT], "tools": [whole]}
    assert read_chat(("f:1", hermes)).tools is None  # the system prompt has them
