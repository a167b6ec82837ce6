"""Interactive chat in the terminal: commands, interruptible answers, two models side by side."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence

from rich.live import Live
from rich.table import Table
from rich.text import Text

from aiakq.arguments.chat import parse_params
from aiakq.errors import AiakqError, error
from aiakq.system.user_path import user_path
from aiakq.terminal import console
from aiakq.terminal.chat_client import Answer, ChatServer, common_tokens
from aiakq.terminal.chat_images import image_url, message_content
from aiakq.terminal.usage_errors import close_names

#: Commands -> their description.
COMMANDS = {
    "/help": "show this",
    "/system TEXT": "set the system prompt; without a text, show it",
    "/params NAME=VALUE ...": "set sampling fields, like temperature=0; NAME= unsets one; alone, show them",
    "/image FILE|URL": "send an image with the next message; alone, take back those that were added",
    "/retry": "regenerate the last answer",
    "/reset": "start a new conversation",
    "/save FILE": "write the conversation to a file, as JSON",
    "/exit": "exit (or press Ctrl-D)",
}
_INTRODUCTION = '/help lists commands.\nEnclose several lines in """, or end a line with \\ to continue it.'


class ChatSession:
    """A conversation with one server or two.

    read       reads a line after showing a prompt; raises EOFError and KeyboardInterrupt.
    questions  the messages of the user.
    images     URLs of the images that the next message will have.
    """

    def __init__(
        self,
        servers: Sequence[ChatServer],
        system: str | None,
        params: dict[str, object],
        read: Callable[[str], str] = input,
        images: Sequence[str] = (),
    ) -> None:
        self.servers = servers
        self.system = system
        self.params = params
        self.questions: list[str | list[dict[str, object]]] = []
        self.images = list(images)
        #: Per server, the answers to ``questions``.
        self.answers: list[list[str]] = [[] for _ in servers]
        self._read = read

    # --- one answer

    def answer_once(self, prompt: str) -> None:
        """Stream the answer to ``prompt`` to stdout; with two servers, one answer after the other."""
        self._ask_next(prompt)
        if len(self.servers) == 1:
            for piece in _pieces(self._ask(0)):
                console.write(piece)
            console.write("\n")
            return
        answers = self._all_answers()
        for letter, answer in zip("AB", answers, strict=False):
            console.write(f"{letter}: {answer.model}\n{answer.text}\n\n")
        console.note(difference(*answers))

    def answer_document(self, prompt: str) -> dict[str, object]:
        """Return the answers to ``prompt`` as one document."""
        self._ask_next(prompt)
        answers = self._all_answers()
        document: dict[str, object] = {"schema_version": 1, "kind": "chat", "messages": self._messages(0)}
        document |= {"params": self.params, "answers": [answer.document() for answer in answers]}
        if len(answers) > 1:
            document["common_tokens"] = common_tokens(*answers)
        return document

    # --- a conversation

    def run(self) -> None:
        """Read questions and commands until the user exits."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (gives input() line editing and a history)
        console.note(f"{' | '.join(server.model for server in self.servers)}. {_INTRODUCTION}")
        while True:
            try:
                text = self._read_question()
            except EOFError:
                console.write("\n")
                return
            except KeyboardInterrupt:
                console.note("\nCtrl-D or /exit ends the conversation.")
                continue
            if text.strip() in ("/exit", "/quit", "/bye"):
                return
            try:
                self._handle_input(text)
            except AiakqError as problem:
                console.failure(problem)

    def _read_question(self) -> str:
        """Read one or several lines from the user."""
        line = self._read("> ")
        if line.strip().startswith('"""'):
            lines = [line.strip().removeprefix('"""')]
            while not lines[-1].endswith('"""') or (len(lines) == 1 and not lines[0]):
                lines.append(self._read(". ").rstrip())
            return "\n".join(lines).removesuffix('"""').strip("\n")
        while line.endswith("\\"):
            line = line[:-1] + "\n" + self._read(". ")
        return line

    def _handle_input(self, text: str) -> None:
        """Run a command, or answer a question."""
        if not text.strip():
            return
        if text.startswith("/"):
            self._command(*text.strip().partition(" ")[::2])
        else:
            self._ask_next(text)
            self._answer()

    def _command(self, name: str, rest: str) -> None:
        rest = rest.strip()
        if name == "/help":
            console.facts("commands", COMMANDS)
        elif name == "/system":
            self.system = rest or self.system
            console.note(f"system: {self.system or 'none'}")
        elif name == "/params":
            self._set_params(rest)
        elif name == "/image":
            self._add_image(rest)
        elif name == "/retry" and self.questions:
            for answers in self.answers:
                del answers[len(self.questions) - 1 :]
            self._answer()
        elif name == "/reset":
            self.questions.clear()
            self.images.clear()
            self.answers = [[] for _ in self.servers]
            console.note("A new conversation.")
        elif name == "/save":
            self._save(rest)
        elif name == "/retry":
            console.note("There is no question yet.")
        else:
            hint = close_names(name, [command.partition(" ")[0] for command in COMMANDS]) or "/help lists commands."
            raise error("usage", reason=f"There is no command {name}.", hint=hint)

    def _ask_next(self, text: str) -> None:
        """Add a message of the user, with the images that were added before."""
        self.questions.append(message_content(text, self.images))
        self.images = []

    def _add_image(self, source: str) -> None:
        if source:
            for server in self.servers:
                server.check_reads_images("/image")
            self.images.append(image_url(source, "/image"))
        else:
            self.images.clear()
        console.note(f"Images of the next message: {len(self.images)}.")

    def _set_params(self, rest: str) -> None:
        for entry in rest.split():
            name, equals, value = entry.partition("=")
            if equals and not value:
                self.params.pop(name, None)
                continue
            try:
                self.params |= parse_params([entry])
            except ValueError:
                expected = "NAME=VALUE"
                raise error("bad_option", option="/params", value=entry, expected=expected, hint="") from None
        shown = " ".join(f"{name}={json.dumps(value)}" for name, value in self.params.items())
        console.note(f"params: {shown or 'those of the server'}")

    def _save(self, file: str) -> None:
        from aiakq.records import write_json

        if not file:
            raise error("usage", reason="/save needs the name of a file.", hint="Like: /save chat.json")
        conversations = [
            {"model": server.model, "messages": self._messages(index)} for index, server in enumerate(self.servers)
        ]
        document = {"schema_version": 1, "kind": "conversation", "params": self.params, "conversations": conversations}
        write_json(document, user_path(file))
        console.note(f"Written to {file}.")

    # --- answers

    def _messages(self, index: int) -> list[dict[str, object]]:
        """Return the conversation with a server so far."""
        messages: list[dict[str, object]] = [{"role": "system", "content": self.system}] if self.system else []
        for at, question in enumerate(self.questions):
            messages.append({"role": "user", "content": question})
            if at < len(self.answers[index]):
                messages.append({"role": "assistant", "content": self.answers[index][at]})
        return messages

    def _ask(self, index: int) -> Iterator[Answer]:
        server = self.servers[index]
        return server.ask(self._messages(index), self.params, logprobs=len(self.servers) > 1)

    def _answer(self) -> None:
        """Answer the last question. A question whose answer failed, or was interrupted before it began, is dropped."""
        try:
            answers = [self._one_answer()] if len(self.servers) == 1 else self._side_by_side()
        except BaseException:
            self.questions.pop()
            raise
        if not any(answer.text for answer in answers):
            self.questions.pop()
            return
        for known, answer in zip(self.answers, answers, strict=True):
            known.append(answer.text)
        if len(answers) > 1:
            console.note(difference(*answers))
        console.note(" | ".join(timing(answer) for answer in answers))

    def _one_answer(self) -> Answer:
        """Stream an answer to stdout. Ctrl-C interrupts it."""
        stream, answer, thought = self._ask(0), Answer(self.servers[0].model), 0
        shown = 0
        try:
            for answer in stream:
                if len(answer.reasoning) > thought:
                    console.out().print(Text(printable(answer.reasoning[thought:]), "dim italic"), end="")
                    thought = len(answer.reasoning)
                if len(answer.text) > shown:
                    if thought and not shown:
                        console.write("\n")
                    console.write(printable(answer.text[shown:]))
                    shown = len(answer.text)
        except KeyboardInterrupt:
            answer.stopped = True
            stream.close()  # type: ignore[attr-defined]
        console.write("\n")
        return answer

    def _side_by_side(self) -> list[Answer]:
        """Stream both answers in columns. Ctrl-C interrupts them."""
        screen = console.out()
        with Live(console=screen, refresh_per_second=8, transient=True) as live:
            answers = self._all_answers(lambda partial: live.update(columns(partial)))
        screen.print(columns(answers))
        return answers

    def _all_answers(self, show: Callable[[list[Answer]], None] = lambda answers: None) -> list[Answer]:
        """Return the answers of all servers, requested concurrently. Raises the error of the first that failed."""
        results = [Answer(server.model) for server in self.servers]
        failures: list[BaseException] = []

        def follow(index: int) -> None:
            try:
                for answer in self._ask(index):
                    answer.stopped = results[index].stopped
                    results[index] = answer
            except AiakqError as problem:
                failures.append(problem)

        threads = [threading.Thread(target=follow, args=(index,), daemon=True) for index in range(len(results))]
        for thread in threads:
            thread.start()
        try:
            while any(thread.is_alive() for thread in threads):
                threads[0].join(0.1)
                threads[-1].join(0.1)
                show(results)
        except KeyboardInterrupt:
            for answer in results:
                answer.stopped = True
            for thread in threads:
                thread.join(5)
        if failures:
            raise failures[0]
        return results


def _pieces(stream: Iterator[Answer]) -> Iterator[str]:
    """Yield the text added by each update of a stream."""
    shown = 0
    for answer in stream:
        yield answer.text[shown:]
        shown = len(answer.text)


def columns(answers: Sequence[Answer]) -> Table:
    """Return a table with answers side by side."""
    table = Table(box=None, expand=True, padding=(0, 2, 0, 0), pad_edge=False)
    for letter, answer in zip("AB", answers, strict=False):
        table.add_column(Text(f"{letter} {console.plain(answer.model)}"), ratio=1, overflow="fold")
    thoughts = [Text(printable(answer.reasoning), "dim italic") for answer in answers]
    if any(thoughts):
        table.add_row(*thoughts)
    table.add_row(*(Text(printable(answer.text)) for answer in answers))
    return table


def difference(one: Answer, two: Answer) -> str:
    """Describe where two answers differ."""
    if one.text == two.text:
        return "Both answers are the same."
    same = common_tokens(one, two)
    if same == len(one.tokens) == len(two.tokens):
        return "The answers differ."  # servers without log-probabilities
    following = [
        f"{answer.tokens[same][0]!r} (log-probability {answer.tokens[same][1]:.2f})"
        if same < len(answer.tokens)
        else "none"
        for answer in (one, two)
    ]
    return f"Tokens in common: {same}. The next token of A: {following[0]}, of B: {following[1]}."


def timing(answer: Answer) -> str:
    """Describe the duration and speed of an answer."""
    parts = [f"{answer.num_tokens} tokens" if answer.num_tokens else ""]
    parts.append(f"first after {console.seconds(answer.first)}" if answer.first else "")
    parts.append(f"{answer.tokens_per_second:.1f} tokens/s" if answer.tokens_per_second else "")
    parts.append("truncated" if answer.finish_reason == "length" else "")
    return ", ".join(filter(None, [*parts, "stopped" if answer.stopped else ""])) or "no answer"


def printable(text: str) -> str:
    """Remove characters that move a terminal's cursor, change colours or change the text direction."""
    return "".join(letter if _is_harmless(letter) else repr(letter)[1:-1] for letter in text)


def _is_harmless(letter: str) -> bool:
    if letter in "\n\t":
        return True
    code = ord(letter)
    is_control = code < 0x20 or 0x7F <= code < 0xA0
    return not (is_control or 0x202A <= code <= 0x202E or 0x2066 <= code <= 0x2069 or 0xD800 <= code <= 0xDFFF)
