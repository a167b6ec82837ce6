"""Workloads: the requests that a benchmark sends, and when it sends them. ``WORKLOADS`` lists them by name.

A workload is a class with ``requests(vocab_size)``; adding one is a line here or an entry point of a package.
"""

from __future__ import annotations

import json
import random
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiakq.arguments.bench import WorkloadArguments
from aiakq.errors import error
from aiakq.registry import Registry

#: Name -> a subclass of ``Workload``.
WORKLOADS = Registry(
    "aiakq.workloads",
    {
        "random": "aiakq.bench.workload:RandomPrompts",
        "dataset": "aiakq.bench.workload:Dataset",
        "prefix": "aiakq.bench.traffic:PrefixPrompts",
        "conversation": "aiakq.bench.traffic:Conversations",
        "trace": "aiakq.bench.traffic:Trace",
        "sharegpt": "aiakq.bench.traffic:ShareGPT",
    },
)

#: Requests of a run on random prompts, if --num-prompts is not given.
NUM_PROMPTS = 100
#: A run on random prompts that finds more of its prompt tokens in the prefix cache measures the cache.
MAX_RANDOM_HIT_RATE = 0.01


@dataclass(frozen=True)
class Request:
    """One request of a workload.

    prompt    text, or token ids so that no tokenizer changes its length.
    at        seconds after the start at which it is sent, of a trace; None: the options say.
    messages  of a chat, in place of the prompt.
    follows   index of the request whose answer it waits for; it is sent right after it.
    message   what is new in it after the answer that it follows.
    model     name of the model or adapter on the server; None: the one that all others go to.
    """

    prompt: str | list[int]
    output_len: int
    at: float | None = None
    messages: list[dict[str, Any]] | None = None
    follows: int | None = None
    message: str | list[int] | None = None
    model: str | None = None


class Workload(ABC):
    """Which requests a benchmark sends. Made before a model is loaded, so that wrong options cost no time.

    fresh_prompts  whether prompts are new in every run, so that hits in the prefix cache spoil the measurement.
    ignore_eos     whether answers have their full length if the user does not say.
    """

    fresh_prompts = True
    ignore_eos = True

    def __init__(self, options: WorkloadArguments, rng: random.Random) -> None:
        self.options = options
        self.rng = rng

    @abstractmethod
    def requests(self, vocab_size: int | None) -> list[Request]:
        """The requests to measure, for a model of this vocabulary; None where a server does not tell its size."""

    def warnings(self) -> list[str]:
        """Sentences that a reader must see before trusting the numbers."""
        return []


class RandomPrompts(Workload):
    """Prompts of --input-len random token ids."""

    def __init__(self, options: WorkloadArguments, rng: random.Random) -> None:
        """Raises ``option_conflict`` if there is a dataset, which would not be read."""
        super().__init__(options, rng)
        if options.dataset is not None:
            hint = "Leave one of them out."
            reason = "random prompts come from no file"
            raise error("option_conflict", option="--workload random", other="--dataset", reason=reason, hint=hint)

    def requests(self, vocab_size: int | None) -> list[Request]:
        """See Workload. Raises ``usage`` if the size of the vocabulary is not known."""
        count = NUM_PROMPTS if self.options.num_prompts is None else self.options.num_prompts
        size = known_size(vocab_size)
        return random_requests(count, self.options.input_len, self.options.output_len, size, self.rng)


class Dataset(Workload):
    """The prompts of --dataset, as ``dataset_requests`` reads them."""

    fresh_prompts = False
    ignore_eos = False

    def __init__(self, options: WorkloadArguments, rng: random.Random) -> None:
        """Raises ``usage`` without a dataset, and what reading it raises."""
        super().__init__(options, rng)
        if options.dataset is None:
            raise error("usage", reason="--workload dataset needs a file of prompts.", hint="Give --dataset FILE.")
        self._requests, self._repeated = dataset_requests(options.dataset, options.num_prompts, options.output_len, rng)

    def requests(self, vocab_size: int | None) -> list[Request]:
        """See Workload."""
        return self._requests

    def warnings(self) -> list[str]:
        """See Workload."""
        return [REPEATED] if self._repeated else []


def workload_name(options: WorkloadArguments) -> str:
    """The name of the workload that the options mean."""
    if options.workload is not None:
        return options.workload
    return "random" if options.dataset is None else "dataset"


def open_workload(options: WorkloadArguments, rng: random.Random) -> Workload:
    """The workload that the options name. Raises ``bad_option`` for an unknown name, and what the workload raises."""
    name = workload_name(options)
    if name not in WORKLOADS:
        expected = f"one of {', '.join(WORKLOADS)}"
        raise error("bad_option", option="--workload", value=name, expected=expected, hint="Packages can add more.")
    return WORKLOADS.load(name)(options, rng)


def known_size(vocab_size: int | None) -> int:
    """``vocab_size``. Raises ``usage`` if it is None."""
    if vocab_size is None:
        raise error(
            "usage",
            reason="Random prompts need the size of the vocabulary, which this server does not tell.",
            hint="Give --vocab-size N (it is in the model's config.json), or --dataset FILE.",
        )
    return vocab_size


def new_seed() -> int:
    """A seed no earlier run had. Repeating a seed against a warm server measures its prefix cache."""
    return secrets.randbits(32)


def random_requests(count: int, input_len: int, output_len: int, vocab_size: int, rng: random.Random) -> list[Request]:
    """``count`` requests of exactly ``input_len`` token ids, uniform over the vocabulary."""
    return [Request([rng.randrange(vocab_size) for _ in range(input_len)], output_len) for _ in range(count)]


def dataset_requests(path: Path, count: int | None, output_len: int, rng: random.Random) -> tuple[list[Request], bool]:
    """Requests from a file: one per line, as text or as JSON with ``prompt`` and optionally ``max_tokens``.

    ``count`` of them in random order; None takes each once. The second value says whether some had to be repeated.
    Raises ``usage`` when the file holds no prompts, ``model_malformed`` for a line that is no such JSON.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        raise error("model_malformed", file=path, reason=problem) from None
    found = [_parse_line(path, number, line, output_len) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise error(
            "usage", reason=f"{path} holds no prompts.", hint='One per line, as plain text or as {"prompt": "..."}.'
        )
    rng.shuffle(found)
    total = len(found) if count is None else count
    return [found[index % len(found)] for index in range(total)], total > len(found)


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


def hit_rate(queries: float | None, hits: float | None) -> float | None:
    """Share of prompt tokens found in the prefix cache; None when nothing was asked or counted."""
    return hits / queries if queries and hits is not None else None


def cache_warning(fresh_prompts: bool, share: float | None) -> list[str]:
    """The sentence that marks a run on new prompts which the prefix cache answered in part."""
    if not fresh_prompts or share is None or share <= MAX_RANDOM_HIT_RATE:
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
