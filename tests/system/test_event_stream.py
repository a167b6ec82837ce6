"""EventReader: the data of server-sent events, however their bytes are cut."""

from __future__ import annotations

import json

import pytest

from aiakq.system.event_stream import EventReader


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_texts_with_other_line_separators_stay_whole(size):
    text = "one\u2028two\u2029three\x85four"
    data = json.dumps({"content": text}, ensure_ascii=False)
    stream = f"event: a\ndata: {data}\n\n: comment\r\ndata:{data}\r\n\r\ndata: [DONE]".encode()
    reader = EventReader()
    found = [each for at in range(0, len(stream), size) for each in reader.feed(stream[at : at + size])]
    assert found == [data, data]
    assert reader.feed(b"\n") == ["[DONE]"]
    assert json.loads(found[0])["content"] == text
