"""Records as the projects that train on them have them, and the conversations that they are.

`CASES` is a table: the record, its turns, the name of its form, and the columns that are not read.
"""

from typing import Any

import pytest

from eval.measure.forms import Chat, read_chat
from eval.measure.records import RecordError

U, A = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}
HUMAN, GPT = {"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}
TALK = "user hi, assistant ho"
LOOK = '{"name": "look", "arguments": {"at": "sea"}}'
TOOL = {"name": "look", "parameters": {}}

CASES: dict[str, tuple[dict[str, Any], str, str, str]] = {
    # OpenAI, TRL, SmolTalk, UltraChat's 200k
    "messages": ({"messages": [U, A], "source": "x"}, TALK, "messages", "source"),
    "messages with the prompt again": (
        {"prompt": "hi", "prompt_id": "7", "messages": [U, A]},
        TALK,
        "messages",
        "prompt prompt_id",
    ),
    "OpenAI's developer": (
        {"messages": [{"role": "developer", "content": "be"}, U, A]},
        f"system be, {TALK}",
        "messages",
        "",
    ),
    "OpenAI's function_call": (
        {"messages": [U, {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": "{}"}}]},
        "user hi, assistant look({})",
        "messages",
        "",
    ),
    "OpenAI's preferences": (
        {"input": {"messages": [U]}, "preferred_output": [A], "non_preferred_output": [U]},
        TALK,
        "preferences (input, preferred_output)",
        "non_preferred_output",
    ),
    "content of strings and text parts": (
        {"messages": [{"role": "user", "content": ["Hello,", {"type": "text", "text": " I am"}]}, A]},
        "user Hello, I am, assistant ho",
        "messages",
        "",
    ),
    # ShareGPT, FastChat, SlimOrca, LLaMA-Factory, Hermes
    "ShareGPT": ({"id": "1", "conversations": [HUMAN, GPT]}, TALK, "ShareGPT (conversations)", "id"),
    "a system column": (
        {"conversations": [HUMAN, GPT], "system": "be"},
        f"system be, {TALK}",
        "ShareGPT (conversations)",
        "",
    ),
    "the same system prompt twice": (
        {"conversations": [{"from": "system", "value": "be"}, HUMAN, GPT], "system_prompt": "be"},
        f"system be, {TALK}",
        "ShareGPT (conversations)",
        "",
    ),
    "leading answers": (
        {"conversations": [{"from": "system", "value": "be"}, GPT, GPT, HUMAN, GPT]},
        f"system be, {TALK}",
        "ShareGPT (conversations)",
        "",
    ),
    "calls and observations": (
        {
            "conversations": [
                HUMAN,
                {"from": "function_call", "value": LOOK},
                {"from": "observation", "value": "blue"},
                GPT,
            ]
        },
        "user hi, assistant look({'at': 'sea'}), tool blue, assistant ho",
        "ShareGPT (conversations)",
        "",
    ),
    "Hermes' calls are text": (
        {"conversations": [HUMAN, {"from": "gpt", "value": f"<tool_call>{LOOK}</tool_call>"}], "category": "x"},
        f"user hi, assistant <tool_call>{LOOK}</tool_call>",
        "ShareGPT (conversations)",
        "category",
    ),
    "LLaMA-Factory's preferences": (
        {"conversations": [HUMAN], "chosen": GPT, "rejected": HUMAN},
        TALK,
        "preferences (conversations, chosen)",
        "rejected",
    ),
    "LMSYS": ({"conversation": [U, A], "model": "x"}, TALK, "LMSYS (conversation)", "model"),
    "UltraChat": (
        {"id": "0", "data": ["hi", "ho", "and", "no"]},
        f"{TALK}, user and, assistant no",
        "UltraChat (data)",
        "id",
    ),
    # a question and its answer
    "Alpaca": (
        {
            "instruction": "And 3?",
            "input": "",
            "output": "7",
            "system": "Be brief.",
            "history": [["Add 2 and 2.", "4"]],
        },
        "system Be brief., user Add 2 and 2., assistant 4, user And 3?, assistant 7",
        "Alpaca (instruction, output)",
        "",
    ),
    "Alpaca's input": (
        {"instruction": "Add", "input": "2", "output": "4"},
        "user Add\n\n2, assistant 4",
        "Alpaca (instruction, output)",
        "",
    ),
    "Orca": (
        {"system_prompt": "Be a pirate.", "question": "hi", "response": "ho"},
        f"system Be a pirate., {TALK}",
        "Orca (question, response)",
        "",
    ),
    "Dolly": (
        {"instruction": "hi", "context": "x", "response": "ho"},
        TALK,
        "question and answer (instruction, response)",
        "context",
    ),
    "a text under a name of turns": (
        {"instruction": "hi", "response": "ho", "data": "x", "conversation": "y"},
        TALK,
        "question and answer (instruction, response)",
        "data conversation",
    ),
    "an input behind turns": (
        {"prompt": [U], "input": "2", "completion": [A]},
        TALK,
        "TRL (prompt, completion)",
        "input",
    ),
    "text and turns of the same": (
        {"instruction": "hi", "response": "ho", "conversations": [HUMAN, GPT, HUMAN, GPT]},
        f"{TALK}, {TALK}",
        "ShareGPT (conversations)",
        "",
    ),
    "columns that are empty": (
        {"messages": None, "conversations": [], "prompt": "", "question": "hi", "answer": "ho", "tools": "[]"},
        TALK,
        "question and answer (question, answer)",
        "",
    ),
    # TRL
    "prompt and completion": (
        {"prompt": "hi", "completion": "ho", "label": True},
        TALK,
        "TRL (prompt, completion)",
        "",
    ),
    "prompt and completion as turns": ({"prompt": [U], "completion": [A]}, TALK, "TRL (prompt, completion)", ""),
    "preferences": ({"prompt": [U], "chosen": [A], "rejected": [U]}, TALK, "preferences (prompt, chosen)", "rejected"),
    "preferences with the prompt again": (
        {"prompt": "hi", "chosen": [U, A], "rejected": [U, U], "messages": [U, A]},
        TALK,
        "messages",
        "rejected",
    ),
    "preferences without a prompt": ({"chosen": [U, A], "rejected": [U, U]}, TALK, "preferences (chosen)", "rejected"),
}


def turns_of(chat: Chat) -> str:
    return ", ".join(
        f"{turn['role']} {turn['content']}"
        + "".join(f"{call['function']['name']}({call['function']['arguments']})" for call in turn.get("tool_calls", ()))
        for turn in chat.messages
    )


@pytest.mark.parametrize("case", CASES)
def test_the_forms_of_a_record(case: str) -> None:
    record, turns, form, unread = CASES[case]
    chat = read_chat(("f:1", record))
    assert (turns_of(chat), chat.form, " ".join(chat.unread)) == (turns, form, unread)
    assert chat.notes == (("records begin with an answer, which is dropped",) if case == "leading answers" else ())


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"text": "x"},
        "expected a record with 'messages', 'conversations', or 'instruction' with 'response', got keys text",
    ),
    ({"messages": "hi"}, "messages: expected a list of turns, got 'hi'"),
    ({"messages": []}, "messages: expected a list of turns"),
    (
        {"messages": [U, A], "question": "hi", "answer": "no"},
        "two that differ, in messages and in question with answer",
    ),
    (
        {"question": "hi", "answer": "ho", "response": "no"},
        "two that differ, in question with response and in question",
    ),
    ({"messages": [U, A], "chosen": [U, {**A, "content": "no"}]}, "two that differ, in messages with chosen"),
    ({"prompt": "no", "chosen": [U, A]}, "two that differ, in prompt with chosen"),
    (
        {"messages": [{**U, "role": "system"}, U, A], "system": "be"},
        "one system prompt, got two that differ, in system and",
    ),
    ({"messages": [U, A], "system": "be", "system_prompt": "me"}, "two that differ, in system and in system_prompt"),
    ({"instruction": "hi", "output": "ho", "history": "hi"}, "history: expected a list of pairs of a question and its"),
    ({"instruction": "hi", "output": "ho", "history": [["hi"]]}, "history: expected a list of pairs"),
    ({"instruction": "hi", "output": "ho", "history": [U, A]}, "history: expected a list of pairs"),
    ({"prompt": "hi", "completion": "ho", "label": False}, "its label says that its answer is bad"),
    (
        {"messages": [U, {"role": "boss", "content": "ho"}]},
        r"messages\[1\]: expected a role of user, assistant, system",
    ),
    ({"messages": [U, {"role": "assistant", "content": 3}]}, r"messages\[1\]: expected text, got 3"),
    (
        {"messages": [{"role": "user", "content": ["a", {"type": "image"}]}, A]},
        "images and other media are not supported",
    ),
    ({"conversations": [HUMAN, {"from": "function_call", "value": "look"}]}, "expected a call as JSON with name and"),
    ({"messages": [U, A], "tools": "look"}, "tools: expected JSON, got 'look'"),
    ({"messages": [U, A], "tools": TOOL}, "tools: expected a list"),
]


@pytest.mark.parametrize(("record", "fault"), REFUSED)
def test_a_record_that_is_none_of_them_is_one_line(record: dict[str, Any], fault: str) -> None:
    with pytest.raises(RecordError, match=rf"^f:1: [^\n]*{fault}[^\n]*$") as error:
        read_chat(("f:1", record))
    assert error.value.reason


def test_tools_have_the_form_of_the_protocol() -> None:
    whole = {"type": "function", "function": TOOL}
    for given in (
        {"tools": [TOOL]},
        {"tools": [whole]},
        {"functions": [TOOL]},
        {"tools": '[{"name": "look", "parameters": {}}]'},
    ):
        assert read_chat(("f:1", {"messages": [U, A], **given})).tools == [whole]
    nothing: Any
    for nothing in ([], None, "", "null", "[]"):
        assert read_chat(("f:1", {"messages": [U, A], "tools": nothing})).tools is None
    preference = {"input": {"messages": [U], "tools": [whole]}, "preferred_output": [A]}
    assert read_chat(("f:1", preference)).tools == [whole]
    hermes = {"conversations": [{"from": "system", "value": "<tools>[]</tools>"}, HUMAN, GPT], "tools": [whole]}
    assert read_chat(("f:1", hermes)).tools is None  # the system prompt has them
