"""Messages to the tokenizer's process arrive unchanged."""

from __future__ import annotations

import pytest

from aiakq.server.process.text_messages import TextRequest
from aiakq.system.channel import RecordDecoder, framed, split


@pytest.mark.parametrize("number", [0, -1, 2**63 - 1, -(2**63), 2**64 - 1, 2**64, -(2**63) - 1, 10**30, -(10**4000)])
def test_integers_of_any_length_arrive_in_schemas_messages_and_arguments(number):
    tool = {"function": {"name": "f", "parameters": {"properties": {"a": {"enum": [number, True, "b", 1.5, None]}}}}}
    request = TextRequest(
        1, messages=[{"role": "user", "content": "c", "score": number}], arguments={"tools": [tool], "limit": number}
    )
    (body,) = split(bytearray(framed(request)))
    assert RecordDecoder(TextRequest).decode(body) == request
