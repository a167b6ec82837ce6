"""What a benchmark asks for: random prompts or the prompts of a file, and when each request is sent."""

from __future__ import annotations

import json
import random
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiakq.errors import error

#: A run on random prompts that finds more of its prompt tokens in the prefix cache measures the cache.
MOST_RANDOM_HITS = 0.01


@dataclass(frozen=True)
class Request:
    """One request of a workload. ``prompt`` is text, or token ids so that no tokenizer changes its length."""

    prompt: str | list[int]
    output_len: int


def new_seed() -> int:
    """A seed no earlier run had. Repeating a seed against a warm server measures its prefix cache."""
    return secrets.randbits(32)


def random_requests(count: int, input_len: int, output_len: int, vocab_size: int, rng: random.Random) -> list[Request]:
    """``count`` requests of exactly ``input_len`` token ids, uniform over the vocabulary."""
    return [Request([rng.randrange(vocab_size) for _ in range(input_len)], output_len) for _ in range(count)]


def dataset_requests(path: Path, count: int | None, output_len: int, rng: random.Random) -> tuple[list[Request], bool]:
    """Requests from a file: JSON lines with ``prompt`` (and ``max_tokens``, if they like), or a prompt a line.

    ``count`` are drawn in random order; None takes each once. The second value says whether some had to be repeated.
    Raises ``usage`` when the file holds no prompts, ``model_malformed`` for a line that is no such JSON.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        raise error("model_malformed", file=path, reason=problem) from None
    found = [_parse_line(path, number, line, output_len) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise error(
            "usage", reason=f"{path} holds no prompts.", hint='One a line, as plain text or as {"prompt": "..."}.'
        )
    rng.shuffle(found)
    wanted = len(found) if count is None else count
    return [found[index % len(found)] for index in range(wanted)], wanted > len(found)


def _parse_line(path: Path, number: int, line: str, output_len: int) -> Request:
    if not line.lstrip().startswith("{"):
        return Request(line, output_len)
    try:
        record = json.loads(line)
    except json.JSONDecodeError as problem:
        raise error("model_malformed", file=f"{path}, line {number}", reason=problem) from None
    prompt, length = record.get("prompt"), record.get("max_tokens", output_len)
    ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if not prompt or not (isinstance(prompt, str) or ids) or type(length) is not int or length < 1:
        raise error(
            "model_malformed",
            file=f"{path}, line {number}",
            reason="'prompt' must be text or token ids and 'max_tokens' a positive integer",
        )
    return Request(prompt, length)


def arrival_times(count: int, per_second: float, burstiness: float, rng: random.Random) -> list[float]:
    """Seconds after the start at which each of ``count`` requests is sent; all 0 for an infinite rate.

    Gaps follow a gamma distribution of shape ``burstiness``: 1 is a Poisson process, less is burstier, more is
    steadier. They are scaled so that the last request leaves at count / rate, the same for every seed.
    """
    if per_second == float("inf"):
        return [0.0] * count
    gaps = [rng.gammavariate(burstiness, 1.0) for _ in range(count)]
    scale = count / per_second / sum(gaps)
    times, now = [], 0.0
    for gap in gaps:
        now += gap * scale
        times.append(now)
    return times


def hit_rate(queries: float | None, hits: float | None) -> float | None:
    """Share of prompt tokens found in the prefix cache; None when nothing was asked or counted."""
    return hits / queries if queries and hits is not None else None


def cache_warning(random_prompts: bool, share: float | None) -> list[str]:
    """The sentence that marks a run on random prompts which the prefix cache answered in part."""
    if not random_prompts or share is None or share <= MOST_RANDOM_HITS:
        return []
    return [
        f"{share:.1%} of the prompt tokens came from the prefix cache, so this run does not measure random prompts. "
        "Use a seed that this server has not seen, or none."
    ]


#: The sentence that marks a run on a dataset that was too small.
REPEATED = "The dataset holds fewer prompts than were sent: the prefix cache answers the repeated ones."


def vocab_size(config: Mapping[str, Any]) -> int | None:
    """The vocabulary size in a config.json, also of models that nest their text part."""
    size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    return size if isinstance(size, int) and size > 0 else None


def input_tokens(requests: Sequence[Request]) -> list[int | None]:
    """Prompt lengths in tokens, None where only a tokenizer could tell."""
    return [len(request.prompt) if isinstance(request.prompt, list) else None for request in requests]
