"""Workloads of related requests: shared prefixes, conversations, recorded traces, ShareGPT."""

from __future__ import annotations

import csv
import io
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from aiakq.arguments.bench import WorkloadArguments
from aiakq.bench.workload import NUM_PROMPTS, Workload, WorkloadRequest, known_size, read_data
from aiakq.errors import AiakqError, error
from aiakq.system.files import lines_of

#: Tokens per block hash of a Mooncake trace.
_MOONCAKE_BLOCK = 512


class PrefixPrompts(Workload):
    """Random prompts that start with one of --num-prefixes prefixes of --prefix-len tokens, round-robin."""

    fresh_prompts = False

    def requests(self, vocab_size: int | None) -> list[WorkloadRequest]:
        """See Workload. Raises ``usage`` if ``vocab_size`` is None."""
        options, size = self.options, known_size(vocab_size)
        count = NUM_PROMPTS if options.num_prompts is None else options.num_prompts
        prefixes = [_tokens(self.rng, options.prefix_len, size) for _ in range(options.num_prefixes)]
        return [
            WorkloadRequest(
                prefixes[index % len(prefixes)] + _tokens(self.rng, options.input_len, size), options.output_len
            )
            for index in range(count)
        ]


class Conversations(Workload):
    """Conversations of --turns requests, each of which is sent after the response to the previous one.

    The chat API gets the actual responses as history, the completions API random tokens of the same number.
    """

    fresh_prompts = False

    def requests(self, vocab_size: int | None) -> list[WorkloadRequest]:
        """See Workload. Returns --num-prompts requests in total, turn by turn. Raises ``usage`` if ``vocab_size`` is
        None.
        """
        options, size = self.options, known_size(vocab_size)
        count = NUM_PROMPTS if options.num_prompts is None else options.num_prompts
        conversations = -(-count // options.turns)
        found: list[WorkloadRequest] = []
        for index in range(count):
            own = _tokens(self.rng, options.input_len, size)
            if index < conversations:
                found.append(WorkloadRequest(own, options.output_len))
                continue
            before = found[index - conversations]
            assert isinstance(before.prompt, list)
            history = before.prompt + _tokens(self.rng, options.output_len, size)
            found.append(WorkloadRequest(history + own, options.output_len, follows=index - conversations, message=own))
        return found


class Trace(Workload):
    """Requests with the lengths and times of a recorded trace: BurstGPT (CSV), Mooncake or aiakq (JSON lines).

    Equal block hashes of Mooncake become equal blocks of tokens. A line of aiakq's format has ``at`` in seconds,
    ``output_length``, and ``prompt`` or ``input_length``.
    """

    fresh_prompts = False

    def __init__(self, options: WorkloadArguments, rng: random.Random) -> None:
        """Raises ``usage`` if there is no file or no request in it, and ``model_malformed``."""
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
            raise error("usage", reason=f"{path} contains no requests.", hint="See docs/bench.md for the format.")

    def requests(self, vocab_size: int | None) -> list[WorkloadRequest]:
        """See Workload. Times count from the first line, divided by --trace-speed."""
        first = min(line["at"] for line in self._lines)
        found = []
        for line in sorted(self._lines, key=lambda line: line["at"]):
            prompt = line.get("prompt") or self._prompt(line, known_size(vocab_size))
            at = (line["at"] - first) / self.options.trace_speed
            found.append(WorkloadRequest(prompt, max(1, line["output_length"]), at))
        return found

    def _prompt(self, line: dict[str, Any], size: int) -> list[int]:
        length = max(1, line["input_length"])
        found: list[int] = []
        for block in line.get("hash_ids") or ():
            found += _tokens(random.Random(f"block {block}"), _MOONCAKE_BLOCK, size)
        return found[:length] + _tokens(self.rng, length - len(found), size)


class ShareGPT(Workload):
    """First user messages of a ShareGPT file, with output lengths estimated from the replies in it."""

    fresh_prompts = False

    def __init__(self, options: WorkloadArguments, rng: random.Random) -> None:
        """Raises ``usage`` if there is no file or no conversation in it, and ``model_malformed``."""
        super().__init__(options, rng)
        path = _file_of(options, "sharegpt")
        try:
            entries = json.loads(read_data(path))
            found = [each for each in map(_first_exchange, entries) if each is not None]
        except (OSError, ValueError, TypeError, AttributeError, KeyError) as problem:
            raise error("model_malformed", file=path, reason=problem) from None
        if not found:
            raise error(
                "usage", reason=f"{path} contains no conversations.", hint="It must be a list in ShareGPT's format."
            )
        rng.shuffle(found)
        self._requests = found[: options.num_prompts]

    def requests(self, vocab_size: int | None) -> list[WorkloadRequest]:
        """See Workload."""
        return self._requests


def follow(request: WorkloadRequest, previous: WorkloadRequest, response: str, chat: bool) -> WorkloadRequest:
    """Return ``request`` with its history: in chat, the messages of ``previous`` and the ``response`` to it."""
    if not chat:
        return request
    history: list[dict[str, object]] = previous.messages or [{"role": "user", "content": previous.prompt}]
    reply, message = {"role": "assistant", "content": response}, {"role": "user", "content": request.prompt}
    return replace(request, messages=[*history, reply, message])


def _tokens(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(count)]


def _file_of(options: WorkloadArguments, name: str) -> Path:
    if options.dataset is None:
        raise error("usage", reason=f"--workload {name} needs a file.", hint="Give --dataset FILE.")
    return options.dataset


def _read_burstgpt(path: Path) -> list[dict[str, Any]]:
    """Read the successful requests of a BurstGPT file; failed ones have no response tokens."""
    rows = list(csv.DictReader(io.StringIO(read_data(path), newline="")))
    lines = []
    for row in rows:
        lengths = {"input_length": int(row["WorkloadRequest tokens"]), "output_length": int(row["Response tokens"])}
        if lengths["output_length"] > 0:
            lines.append({"at": float(row["Timestamp"]), **lengths})
    return lines


def _read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read a Mooncake trace, whose ``timestamp`` is in milliseconds, or a trace in aiakq's format."""
    lines = []
    for text in lines_of(read_data(path)):
        if not text.strip():
            continue
        line = json.loads(text)
        at = float(line["timestamp"]) / 1000 if "timestamp" in line else float(line["at"])
        if not isinstance(line.get("prompt"), str) and not isinstance(line["input_length"], int):
            raise ValueError("'input_length' must be an integer")
        lines.append({**line, "at": at, "output_length": int(line["output_length"])})
    return lines


def _first_exchange(entry: dict[str, Any]) -> WorkloadRequest | None:
    """Return the first message of a conversation with the estimated length of its reply, or None without a reply."""
    turns: Sequence[dict[str, str]] = entry.get("conversations") or ()
    if len(turns) < 2 or not turns[0]["value"].strip() or not turns[1]["value"].strip():
        return None
    # OpenAI's estimate: four tokens per three English words.
    return WorkloadRequest(turns[0]["value"], max(1, len(turns[1]["value"].split()) * 4 // 3))
