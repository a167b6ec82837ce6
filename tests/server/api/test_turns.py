"""Messages of other APIs: parts under the names of every API are read in each of them."""

from __future__ import annotations

import pytest

from aiakq.server.api.messages import blocks
from aiakq.server.api.responses import items

PARTS = [
    {"type": "text", "text": "A"},
    {"type": "input_text", "text": "A"},
    {"type": "output_text", "text": "A"},
    {"type": "refusal", "refusal": "A"},
    "A",
]
THOUGHTS = [
    {"type": "thinking", "thinking": "Hm."},
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]},
    {"type": "reasoning_text", "text": "Hm."},
]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("role", ["user", "assistant", "system"])
def test_text_is_read_under_every_name(part, role):
    expected = [{"role": role, "content": "A\nB"}]
    given = [{"role": role, "content": [part, {"type": "text", "text": "B"}]}]
    assert blocks.messages_of(None, given) == expected
    assert items.messages_of(None, given) == expected


@pytest.mark.parametrize("thought", THOUGHTS)
def test_reasoning_among_the_parts_of_an_answer_is_reasoning(thought):
    expected = [{"role": "assistant", "reasoning_content": "Hm.", "content": "A"}]
    given = [{"role": "assistant", "content": [thought, {"type": "redacted_thinking", "data": "x"}, "A"]}]
    assert blocks.messages_of(None, given) == expected
    assert items.messages_of(None, given) == expected


@pytest.mark.parametrize("part", PARTS)
def test_results_may_be_parts(part):
    asked = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [part]}, "And?"]}
    found = blocks.messages_of(None, [asked, result])
    assert found[1:] == [
        {"role": "tool", "content": "A", "tool_call_id": "a"},
        {"role": "user", "content": "And?"},
    ]
    output = {"type": "function_call_output", "call_id": "a", "output": [part]}
    assert items.messages_of(None, [output]) == [{"role": "tool", "content": "A", "tool_call_id": "a"}]
