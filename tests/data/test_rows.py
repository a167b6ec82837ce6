"""Rows of common data sets: every text of a row is read, named as not read, or the row is refused."""

from __future__ import annotations

import json

import pytest

from aiakq.data.rows import RowOptions, document_of
from aiakq.errors import AiakqError

ASK, ANSWER, SYSTEM, CONTEXT = "Who was he then?", "He was a sailor.", "Be brief and kind.", "Ahab sailed the seas."
USER, ASSISTANT = {"role": "user", "content": ASK}, {"role": "assistant", "content": ANSWER}
TALK = [USER, ASSISTANT]
WITH_SYSTEM = [{"role": "system", "content": SYSTEM}, *TALK]
SHAREGPT = [{"from": "human", "value": ASK}, {"from": "gpt", "value": ANSWER}]
TOOL = {"name": "find", "description": "Finds people.", "parameters": {"type": "object", "properties": {}}}
CALL = {"name": "find", "arguments": {"who": "Ahab"}}
CALLING = {
    "role": "assistant",
    "tool_calls": [{"type": "function", "function": CALL}],
    "content": "",
}


def read(row: object, column: str | None = None):
    rows = RowOptions(column)
    return document_of(row, "rows.jsonl", "row 1", rows), rows


def talk(row: object) -> list[dict]:
    found, rows = read(row)
    assert not rows.unread, rows.unread
    return list(found.messages)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": json.dumps(TALK)},
        {"messages": str(TALK)},
        {"conversations": json.dumps(SHAREGPT)},
        {"conversation": {"messages": TALK}},
        {"text": json.dumps(TALK)},
        {"text": str(SHAREGPT)},
        {"messages": {"role": ["user", "assistant"], "content": [ASK, ANSWER]}},
        {"conversations": [ASK, ANSWER]},
        {"id": "0", "data": [ASK, ANSWER]},
        {"conversation": [{"input": ASK, "output": ANSWER}]},
        {"chat": {"turn_1": {"Human": ASK, "MOSS": ANSWER}}},
        {"conversations": [{"role": "user", "value": ASK}, {"role": "bot", "text": ANSWER}]},
        {"Messages": [{"role": "User", "content": ASK}, {"role": "Chatbot", "content": ANSWER}]},
        {"contents": [{"role": "user", "parts": [{"text": ASK}]}, {"role": "model", "parts": [{"text": ANSWER}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": ASK, "image": None}]}, ASSISTANT]},
        {"messages": [{"role": "user", "content": [{"text": ASK}]}, {"role": "assistant", "content": [ANSWER]}]},
        {"dialog": [{"speaker": "client", "text": ASK}, {"speaker": "agent", "text": ANSWER}]},
        {"custom_id": "1", "method": "POST", "body": {"model": "m", "messages": TALK}},
        {"prompt": [USER], "completion": [ASSISTANT], "label": True},
        {"prompt": ASK, "chosen": TALK, "messages": TALK, "score_chosen": 8.5},
        {"prompt": ASK, "completion": TALK},
        {"chosen": TALK},
        {"prompt": TALK},
        {"conversations": [SHAREGPT[0]], "chosen": SHAREGPT[1]},
        {"messages": [USER], "response": ANSWER},
        {"INSTRUCTION": ASK, "RESPONSE": ANSWER},
        {"Question": ASK, "Answer": ANSWER},
        {"input": ASK, "target": ANSWER, "kind": "qa"},
        {"user": ASK, "assistant": ANSWER},
        {"message_1": ASK, "message_2": ANSWER},
        {"problem": ASK, "solution": ANSWER, "answer": 42},
        {"question": ASK, "answers": {"text": [ANSWER, "A sailor."], "answer_start": [3, 9]}},
        {"prompt": ASK, "answers": [{"answer": "Nobody.", "rank": 2.0}, {"answer": ANSWER, "rank": 1.0}]},
        {"instruction": ASK, "input": "nan", "output": ANSWER},
        {"instruction": ASK, "input": float("nan"), "output": ANSWER, "system": None, "history": []},
        {"instruction": ASK, "chosen_response": ANSWER},
        {"question": ASK, "query": ASK, "response": ANSWER},
        {"prompt": ASK.encode(), "response": ANSWER.encode()},
        {"instruction": ASK, "input": "", "output": [ANSWER]},
        {"input": {"messages": [USER]}, "preferred_output": [ASSISTANT]},
        {"问题": ASK, "答案": ANSWER},
        {"user_input": ASK, "bot_response": ANSWER, "turn_id": 1},
        {"conversation": [{"human": ASK, "assistant": ANSWER}]},
        json.dumps({"prompt": ASK, "response": ANSWER}),
    ],
)
def test_a_question_and_its_answer_are_read_in_every_form(row):
    assert talk(row) == TALK


@pytest.mark.parametrize(
    "row",
    [
        {"system": SYSTEM, "prompt": ASK, "response": ANSWER},
        {"system_prompt": SYSTEM, "question": ASK, "response": ANSWER},
        {"system": SYSTEM, "conversations": SHAREGPT},
        {"systemInstruction": {"parts": [{"text": SYSTEM}]}, "messages": TALK},
        {"system": [{"text": SYSTEM}], "messages": TALK},
        {"system": {"from": "system", "role_type": "", "value": SYSTEM}, "conversation": SHAREGPT},
        {"messages": TALK, "instruction": ASK, "input": "", "output": ANSWER, "system": SYSTEM, "history": []},
        {"system": SYSTEM, "chosen": TALK},
        {"system": SYSTEM, "conversations": [{"from": "system", "value": SYSTEM}, *SHAREGPT]},
        {"System Prompt": SYSTEM, "instruction": ASK, "output": ANSWER},
    ],
)
def test_the_system_prompt_of_another_column_comes_first(row):
    assert talk(row) == WITH_SYSTEM


@pytest.mark.parametrize("name", ["context", "passage", "article", "document", "story"])
def test_a_question_comes_after_its_context(name):
    expected = [{"role": "user", "content": f"{CONTEXT}\n\n{ASK}"}, ASSISTANT]
    assert talk({name: CONTEXT, "question": ASK, "answer": ANSWER}) == expected


def test_several_texts_of_a_context_are_read():
    expected = [{"role": "user", "content": f"{CONTEXT}\n\nIt was blue.\n\n{ASK}"}, ASSISTANT]
    assert talk({"documents": [CONTEXT, "It was blue."], "question": ASK, "response": ANSWER}) == expected


def test_all_parts_of_a_question_are_read():
    expected = [{"role": "user", "content": f"Answer briefly.\n\n{ASK}"}, ASSISTANT]
    assert talk({"instruction": "Answer briefly.", "input": ASK, "output": ANSWER}) == expected
    assert talk({"instruction": "Answer briefly.", "question": ASK, "answer": ANSWER}) == expected


@pytest.mark.parametrize(
    "history",
    [
        [["Hello to you.", "Good morning."]],
        json.dumps([["Hello to you.", "Good morning."]]),
        ["Hello to you.", "Good morning."],
    ],
)
def test_earlier_turns_come_first(history):
    earlier = [{"role": "user", "content": "Hello to you."}, {"role": "assistant", "content": "Good morning."}]
    assert talk({"instruction": ASK, "output": ANSWER, "history": history}) == [*earlier, *TALK]


@pytest.mark.parametrize(
    ("role", "expected"),
    [
        ("Human", "user"),
        ("prompter", "user"),
        ("USER:", "user"),
        ("bot", "assistant"),
        ("Assistant", "assistant"),
        ("gpt-4", "assistant"),
        ("observation", "tool"),
        ("tool_response", "tool"),
        ("ipython", "tool"),
        ("developer", "developer"),
        ("narrator", "narrator"),
    ],
)
def test_roles_have_the_names_of_chat_templates(role, expected):
    assert talk([USER, {"from": role, "value": ANSWER}])[1] == {"role": expected, "content": ANSWER}


@pytest.mark.parametrize("role", ["function_call", "tool_call", "function"])
@pytest.mark.parametrize("content", [json.dumps(CALL), json.dumps([CALL])])
def test_calls_in_texts_become_calls(role, content):
    steps = [
        SHAREGPT[0],
        {"from": role, "value": content},
        {"from": "observation", "value": "Found."},
        SHAREGPT[1],
    ]
    found, rows = read({"conversations": steps, "tools": json.dumps([TOOL])})
    assert read({"conversations": steps, "tools": [json.dumps(TOOL)]})[0] == found
    assert list(found.messages) == [USER, CALLING, {"role": "tool", "content": "Found."}, ASSISTANT]
    assert list(found.tools) == [{"type": "function", "function": TOOL}] and not rows.unread


def test_a_function_after_an_answer_is_its_result():
    found = talk([USER, ASSISTANT, {"role": "function", "name": "find", "content": "Found."}])
    assert found[2] == {"name": "find", "role": "tool", "content": "Found."}


def test_a_call_without_text_is_a_message():
    old = {"role": "assistant", "content": None, "function_call": {"name": "find", "arguments": "{}"}}
    assert talk([USER, old])[1]["content"] == ""


@pytest.mark.parametrize(
    ("row", "unread"),
    [
        ({"prompt": ASK, "chosen": ANSWER, "rejected": "Nobody knows that."}, "rejected"),
        ({"text": CONTEXT, "summary": "It is about the sea."}, "summary"),
        ({"text": CONTEXT, "code": "while True: pass or not"}, "code"),
        ({"question": ASK, "answer": ANSWER, "reasoning": "He had a ship, so."}, "reasoning"),
        ({"question": ASK, "answer": ANSWER, "choices": ["He was a cook.", ANSWER]}, "choices"),
        ({"messages": TALK, "rejected": [USER, {"role": "assistant", "content": "Nobody knows that."}]}, "rejected"),
        ({"messages": TALK, "tools": "one that finds people"}, "tools"),
        ({"instruction": ASK, "output": [ANSWER, "He was a cook, I think."]}, "output"),
    ],
)
def test_columns_with_text_that_is_not_read_are_named(row, unread):
    _, rows = read(row)
    assert list(rows.unread) == [unread]
    assert f"not read: '{unread}'" in rows.warnings("rows.jsonl")[0]


@pytest.mark.parametrize(
    "row",
    [
        {"text": CONTEXT, "url": "https://example.org/a/b", "title": "A title of words", "timestamp": "2020 01 02"},
        {"instruction": ASK, "output": ANSWER, "text": f"### Question: {ASK} ### Answer: {ANSWER}"},
        {"messages": TALK, "prompt": ASK, "prompt_id": "af03"},
    ],
)
def test_columns_that_add_no_text_are_not_reported(row):
    found, rows = read(row)
    assert found is not None and not rows.unread


@pytest.mark.parametrize(
    "row",
    [
        {"text": "nan"},
        {"text": "NaN", "id": 3},
        {"text": float("nan")},
        {"messages": []},
        {"messages": "[]"},
        {"messages": None, "id": 1},
        {"messages": [USER, {"role": "assistant", "content": None}]},
        {"instruction": ASK, "output": None},
        {"instruction": ASK, "output": "nan"},
        {"question": None, "answer": ANSWER},
        {"context": CONTEXT, "question": ASK, "answers": {"text": [], "answer_start": []}},
        {},
        "",
        None,
    ],
)
def test_rows_without_a_text_are_counted(row):
    found, rows = read(row)
    assert found is None and (rows.num_rows, rows.num_empty) == (1, 1)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": "[{'role': 'user', 'content': 'Hi'}\n {'role': 'assistant', 'content': 'Ho'}]"}, "were printed"),
        ({"text": "array([{'content': 'Hi', 'role': 'user'}], dtype=object)"}, "were printed"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": ASK}]}]}, "type image"),
        ({"question": ASK, "choices": ["a", "b"], "answer": 1}, "'answer', which is no text"),
        ({"input_ids": [1, 2], "attention_mask": [1, 1]}, "token ids instead of text"),
        ({"premise": CONTEXT, "hypothesis": ASK}, "no text, messages, or question"),
        ({"messages": {"role": ["user"], "content": [ASK, ANSWER]}}, "different numbers of entries"),
        ({"text": b"\xff\xfe"}, "not UTF-8"),
    ],
)
def test_rows_that_cannot_be_read_right_are_refused(row, reason):
    with pytest.raises(AiakqError, match=reason):
        read(row)


def test_the_only_column_with_a_text_stays_the_same():
    rows = RowOptions()
    assert document_of({"words": CONTEXT, "tag": "sea"}, "f", "row 1", rows).text == CONTEXT
    assert document_of({"words": "Sea.", "tag": "of the sea"}, "f", "row 2", rows).text == "Sea."
