"""Workloads whose requests have something in common: a prefix, a conversation, or the times of a recorded trace."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from aiakq.arguments.bench import WorkloadArguments
from aiakq.bench.workload import NUM_PROMPTS, Request, Workload, known_size
from aiakq.errors import AiakqError, error

#: Tokens that one hash of a Mooncake trace stands for.
_MOONCAKE_BLOCK = 512


class PrefixPrompts(Workload):
    """Random prompts, each of which begins with one of --num-prefixes prefixes of --prefix-len tokens, in turn."""

    fresh_prompts = False

    def requests(self, vocab_size: int | None) -> list[Request]:
        """See Workload. Raises ``usage`` if the size of the vocabulary is not known."""
        options, size = self.options, known_size(vocab_size)
        count = NUM_PROMPTS if options.num_prompts is None else options.num_prompts
        prefixes = [_tokens(self.rng, options.prefix_len, size) for _ in range(options.num_prefixes)]
        return [
            Request(prefixes[index % len(prefixes)] + _tokens(self.rng, options.input_len, size), options.output_len)
            for index in range(count)
        ]


class Conversations(Workload):
    """Conversations of --turns requests; each but the first follows the answer to the one before it.

    To chat it is sent with the answers so far, to completions with as many random tokens in their place.
    """

    fresh_prompts = False

    def requests(self, vocab_size: int | None) -> list[Request]:
        """See Workload: --num-prompts requests in all, turn by turn. Raises ``usage`` without a vocabulary's size."""
        options, size = self.options, known_size(vocab_size)
        count = NUM_PROMPTS if options.num_prompts is None else options.num_prompts
        conversations = -(-count // options.turns)
        found: list[Request] = []
        for index in range(count):
            own = _tokens(self.rng, options.input_len, size)
            if index < conversations:
                found.append(Request(own, options.output_len))
                continue
            before = found[index - conversations]
            assert isinstance(before.prompt, list)
            history = before.prompt + _tokens(self.rng, options.output_len, size)
            found.append(Request(history + own, options.output_len, follows=index - conversations, message=own))
        return found


class Trace(Workload):
    """Requests with the lengths and the times of a recorded trace: BurstGPT (CSV), Mooncake or our own (JSON lines).

    Mooncake's hashes become shared blocks of tokens. A line of ours has ``at`` in seconds, and a ``prompt`` or an
    ``input_length``, and an ``output_length``.
    """

    fresh_prompts = False

    def __init__(self, options: WorkloadArguments, rng: random.Random) -> None:
        """Raises ``usage`` without a file, and ``model_malformed``."""
        super().__init__(options, rng)
        path = _file_of(options, "trace")
        read = _read_burstgpt if path.suffix.lower() == ".csv" else _read_json_lines
        try:
            self._lines = read(path)[: options.num_prompts]
        except AiakqError:
            raise
        except (OSError, ValueError, KeyError, TypeError) as problem:
            reason = f"a line lacks {problem}" if isinstance(problem, KeyError) else problem
            raise error("model_malformed", file=path, reason=reason) from None
        if not self._lines:
            raise error("usage", reason=f"{path} holds no requests.", hint="See docs/bench.md for its form.")

    def requests(self, vocab_size: int | None) -> list[Request]:
        """See Workload. Times count from the first line, divided by --trace-speed."""
        first = min(line["at"] for line in self._lines)
        found = []
        for line in sorted(self._lines, key=lambda line: line["at"]):
            prompt = line.get("prompt") or self._prompt(line, known_size(vocab_size))
            at = (line["at"] - first) / self.options.trace_speed
            found.append(Request(prompt, max(1, line["output_length"]), at))
        return found

    def _prompt(self, line: dict[str, Any], size: int) -> list[int]:
        length = max(1, line["input_length"])
        found: list[int] = []
        for block in line.get("hash_ids") or ():
            found += _tokens(random.Random(f"block {block}"), _MOONCAKE_BLOCK, size)
        return found[:length] + _tokens(self.rng, length - len(found), size)


class ShareGPT(Workload):
    """First questions of the conversations in a ShareGPT file; the length of the answer in it, in words, is kept."""

    fresh_prompts = False

    def __init__(self, options: WorkloadArguments, rng: random.Random) -> None:
        """Raises ``usage`` without a file, and ``model_malformed``."""
        super().__init__(options, rng)
        path = _file_of(options, "sharegpt")
        try:
            entries = json.loads(path.read_text(encoding="utf-8"))
            found = [each for each in map(_first_exchange, entries) if each is not None]
        except (OSError, ValueError, TypeError, AttributeError, KeyError) as problem:
            raise error("model_malformed", file=path, reason=problem) from None
        if not found:
            raise error("usage", reason=f"{path} holds no conversations.", hint="It is a list of ShareGPT's form.")
        rng.shuffle(found)
        self._requests = found[: options.num_prompts]

    def requests(self, vocab_size: int | None) -> list[Request]:
        """See Workload."""
        return self._requests


def follow(request: Request, before: Request, answer: str, chat: bool) -> Request:
    """``request`` with what was said before it: in chat the messages and the ``answer`` to the last one."""
    if not chat:
        return request
    history: list[dict[str, Any]] = before.messages or [{"role": "user", "content": before.prompt}]
    said: list[dict[str, Any]] = [{"role": "assistant", "content": answer}, {"role": "user", "content": request.prompt}]
    return replace(request, messages=[*history, *said])


def _tokens(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(count)]


def _file_of(options: WorkloadArguments, name: str) -> Path:
    if options.dataset is None:
        raise error("usage", reason=f"--workload {name} needs a file.", hint="Give --dataset FILE.")
    return options.dataset


def _read_burstgpt(path: Path) -> list[dict[str, Any]]:
    """The requests of a BurstGPT file that were answered; failed ones have no response tokens."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    lines = []
    for row in rows:
        lengths = {"input_length": int(row["Request tokens"]), "output_length": int(row["Response tokens"])}
        if lengths["output_length"] > 0:
            lines.append({"at": float(row["Timestamp"]), **lengths})
    return lines


def _read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Lines of a Mooncake trace, whose ``timestamp`` is in milliseconds, or of ours."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        if not text.strip():
            continue
        line = json.loads(text)
        at = float(line["timestamp"]) / 1000 if "timestamp" in line else float(line["at"])
        if not isinstance(line.get("prompt"), str) and not isinstance(line["input_length"], int):
            raise ValueError("'input_length' must be an integer")
        lines.append({**line, "at": at, "output_length": int(line["output_length"])})
    return lines


def _first_exchange(entry: dict[str, Any]) -> Request | None:
    """The first question of a conversation, for an answer about as long as the one it got; None if it has none."""
    turns: Sequence[dict[str, str]] = entry.get("conversations") or ()
    if len(turns) < 2 or not turns[0]["value"].strip() or not turns[1]["value"].strip():
        return None
    # Four tokens for three words of English, as OpenAI counts.
    return Request(turns[0]["value"], max(1, len(turns[1]["value"].split()) * 4 // 3))
