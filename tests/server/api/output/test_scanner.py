"""TextScanner: the same is read however the text arrives."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from aiakq.server.api.output import scanner
from aiakq.server.api.output.scanner import Marks, Parsing, TextScanner


def read(parse: Callable[[TextScanner], Parsing[object]], *pieces: str) -> object:
    """What ``parse`` returns for a text that arrives in ``pieces``."""
    text = TextScanner()
    parsing = parse(text)
    for number in range(len(pieces) + 1):
        try:
            next(parsing)
        except StopIteration as stop:
            return stop.value
        text.feed(pieces[number] if number < len(pieces) else "", ended=number == len(pieces))
    try:
        next(parsing)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("it waits for more text than there is")


def split(text: TextScanner) -> Parsing[list[str]]:
    """The text between marks, and the marks."""
    found = []
    while True:
        pieces: list[str] = []
        mark = yield from text.until(Marks("<a>", "<b>", "b["), pieces.append)
        found += ["".join(pieces), mark]
        if not mark:
            return found


@given(text=st.text("<ab>[", max_size=20), cuts=st.lists(st.integers(0, 20), max_size=5))
def test_marks_are_found_however_the_text_is_cut(text, cuts):
    cuts = sorted(min(cut, len(text)) for cut in cuts)
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    found = read(split, *pieces)
    assert found == read(split, text) and "".join(found) == text


def test_no_more_is_held_back_than_may_begin_a_mark():
    text, pieces = TextScanner(), []
    parsing = text.until(Marks("<tool>"), pieces.append)
    for piece, shown in (("a <", "a "), ("b", "a <b"), (" <to", "a <b "), ("ol", "a <b "), ("!", "a <b <tool!")):
        text.feed(piece)
        next(parsing)
        assert "".join(pieces) == shown


def test_the_longest_of_several_texts_is_read():
    def which(text: TextScanner) -> Parsing[str]:
        return (yield from text.match("```", "```json"))

    for pieces in (["```json{"], ["``", "`", "js", "on{"]):
        assert read(which, *pieces) == "```json"
    for pieces in (["```js{"], ["`", "``", "j", "s{"], ["```"]):
        assert read(which, *pieces) == "```"
    assert read(which, "``x") == read(which, "``") == ""


def test_what_was_read_can_be_read_again_within_a_limit(monkeypatch):
    monkeypatch.setattr(scanner, "MAX_READ_AGAIN", 5)
    text = TextScanner()
    text.feed("é[abc]", ended=True)
    for _ in range(5):
        text.take()
    assert text.read_again("[abc", keep=1) == "[" and (text.num_chars, text.num_bytes) == (2, 3)
    assert "".join(text.take() for _ in range(3)) == "abc"
    assert text.read_again("abc", keep=0) == "abc" and text.take() == "]" and text.is_exhausted


def test_a_mark_that_comes_next_is_not_read():
    def rest(text: TextScanner) -> Parsing[tuple[bool, str]]:
        found = yield from text.is_before("[A]")
        pieces: list[str] = []
        yield from text.rest(pieces.append)
        return found, "".join(pieces)

    for pieces in (["[A]b"], ["[", "A", "]b"]):
        assert read(rest, *pieces) == (True, "[A]b")
    for pieces in (["[Ab"], ["[", "Ab"], ["[A"], [""]):
        assert read(rest, *pieces) == (False, "".join(pieces))


def test_the_beginning_of_an_end_that_is_cut_off_is_skipped():
    def skip(text: TextScanner) -> Parsing[bool]:
        yield from text.skip("</call>")
        return not (yield from text.peek())

    assert read(skip, "</ca") is True and read(skip, "</", "call>") is True
    assert read(skip, "</ca!") is False


def test_what_was_read_can_be_taken_back():
    def recorded(text: TextScanner) -> Parsing[str]:
        text.record("<x>")
        yield from text.skip_spaces()
        yield from text.until(Marks(";"), lambda piece: None)
        return text.recorded()

    assert read(recorded, " \n a", "b;c") == "<x> \n ab;"
