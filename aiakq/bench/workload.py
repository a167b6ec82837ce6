"""Workloads: the requests that a benchmark sends. ``WORKLOADS`` registers them by name.

To add one, subclass ``Workload`` and register it here or as an entry point of a package.
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
from aiakq.system.files import lines_of, read_named_text

#: Name -> a subclass of ``Workload``.
WORKLOADS: Registry[type[Workload]] = Registry(
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

#: Default of --num-prompts for random prompts.
NUM_PROMPTS = 100
#: Prefix-cache hit rate above which a run on random prompts gets a warning.
MAX_RANDOM_HIT_RATE = 0.01

#: Maximum size of a file of requests.
_MAX_BYTES = 1 << 30


@dataclass(frozen=True)
class WorkloadRequest:
    """One request of a workload.

    prompt      text, or token ids, whose number no tokenizer changes.
    output_len  number of tokens to generate.
    at          send time of a trace in seconds after the start, or None.
    messages    chat messages that replace the prompt.
    follows     index of the request whose response precedes it in a conversation, or None.
    message     its part of ``prompt`` after that response.
    model       name of the model or adapter on the server; None for the default.
    """

    prompt: str | list[int]
    output_len: int
    at: float | None = None
    messages: list[dict[str, Any]] | None = None
    follows: int | None = None
    message: str | list[int] | None = None
    model: str | None = None


class Workload(ABC):
    """Generates the requests of a benchmark. Created before a model is loaded, so that invalid options fail early.

    fresh_prompts  whether prompts are new in every run, so that prefix-cache hits invalidate the measurement.
    ignore_eos     default of --ignore-eos.
    """

    fresh_prompts = True
    ignore_eos = True

    def __init__(self, options: WorkloadArguments, rng: random.Random) -> None:
        self.options = options
        self.rng = rng

    @abstractmethod
    def requests(self, vocab_size: int | None) -> list[WorkloadRequest]:
        """Return the requests to measure. ``vocab_size`` is None if the server does not report it."""

    def warnings(self) -> list[str]:
        """Return warnings about the validity of the measurement."""
        return []


class RandomPrompts(Workload):
    """Prompts of --input-len random token ids."""

    def __init__(self, options: WorkloadArguments, rng: random.Random) -> None:
        """Raises ``option_conflict`` if there is a dataset."""
        super().__init__(options, rng)
        if options.dataset is not None:
            hint = "Leave one of them out."
            reason = "random prompts are not read from a file"
            raise error("option_conflict", option="--workload random", other="--dataset", reason=reason, hint=hint)

    def requests(self, vocab_size: int | None) -> list[WorkloadRequest]:
        """See Workload. Raises ``usage`` if ``vocab_size`` is None."""
        count = NUM_PROMPTS if self.options.num_prompts is None else self.options.num_prompts
        size = known_size(vocab_size)
        return random_requests(count, self.options.input_len, self.options.output_len, size, self.rng)


class Dataset(Workload):
    """The prompts of --dataset; see ``dataset_requests``."""

    fresh_prompts = False
    ignore_eos = False

    def __init__(self, options: WorkloadArguments, rng: random.Random) -> None:
        """Raises ``usage`` without a dataset, and the errors of ``dataset_requests``."""
        super().__init__(options, rng)
        if options.dataset is None:
            raise error("usage", reason="--workload dataset needs a file of prompts.", hint="Give --dataset FILE.")
        self._requests, self._repeated = dataset_requests(options.dataset, options.num_prompts, options.output_len, rng)

    def requests(self, vocab_size: int | None) -> list[WorkloadRequest]:
        """See Workload."""
        return self._requests

    def warnings(self) -> list[str]:
        """See Workload."""
        return [REPEATED] if self._repeated else []


def workload_name(options: WorkloadArguments) -> str:
    """Return the name of the workload: --workload, or "dataset" or "random" by default."""
    if options.workload is not None:
        return options.workload
    return "random" if options.dataset is None else "dataset"


def open_workload(options: WorkloadArguments, rng: random.Random) -> Workload:
    """Create the workload of the options. Raises ``bad_option`` for an unknown name, and the workload's errors."""
    name = workload_name(options)
    if name not in WORKLOADS:
        expected = f"one of {', '.join(WORKLOADS)}"
        raise error("bad_option", option="--workload", value=name, expected=expected, hint="Packages can add more.")
    workload: Workload = WORKLOADS.load(name)(options, rng)
    return workload


def known_size(vocab_size: int | None) -> int:
    """Return ``vocab_size``. Raises ``usage`` if it is None."""
    if vocab_size is None:
        raise error(
            "usage",
            reason="Random prompts need the vocabulary size, which this server does not report.",
            hint="Give --vocab-size N (vocab_size in the model's config.json), or --dataset FILE.",
        )
    return vocab_size


def new_seed() -> int:
    """Return a random seed. Repeating a seed against a warm server would measure its prefix cache."""
    return secrets.randbits(32)


def random_requests(
    count: int, input_len: int, output_len: int, vocab_size: int, rng: random.Random
) -> list[WorkloadRequest]:
    """Return ``count`` requests of ``input_len`` token ids, uniformly random over the vocabulary."""
    return [WorkloadRequest([rng.randrange(vocab_size) for _ in range(input_len)], output_len) for _ in range(count)]


def read_data(path: Path) -> str:
    """Return the text of a file of requests. Raises ``model_malformed`` for anything but a regular UTF-8 file."""
    return read_named_text(path, _MAX_BYTES, lambda reason: error("model_malformed", file=path, reason=reason))


def dataset_requests(
    path: Path, count: int | None, output_len: int, rng: random.Random
) -> tuple[list[WorkloadRequest], bool]:
    """Read requests from a file with one per line, as text or as JSON with ``prompt`` and optionally ``max_tokens``.

    Returns ``count`` requests in random order (None for all of them), and whether some had to be repeated. Raises
    ``usage`` if the file has no prompts, ``model_malformed`` for invalid JSON.
    """
    lines = lines_of(read_data(path))
    found = [_parse_line(path, number, line, output_len) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise error(
            "usage", reason=f"{path} contains no prompts.", hint='One per line, as text or as {"prompt": "..."}.'
        )
    rng.shuffle(found)
    total = len(found) if count is None else count
    return [found[index % len(found)] for index in range(total)], total > len(found)


def _parse_line(path: Path, number: int, line: str, output_len: int) -> WorkloadRequest:
    if not line.lstrip().startswith("{"):
        return WorkloadRequest(line, output_len)
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
    return WorkloadRequest(prompt, length)


def hit_rate(queries: float | None, hits: float | None) -> float | None:
    """Return the fraction of prompt tokens found in the prefix cache, or None if none were looked up or counted."""
    return hits / queries if queries and hits is not None else None


def cache_warning(fresh_prompts: bool, rate: float | None) -> list[str]:
    """Return a warning if a run on new prompts had prefix-cache hits. ``rate`` is the hit rate."""
    if not fresh_prompts or rate is None or rate <= MAX_RANDOM_HIT_RATE:
        return []
    return [
        f"{rate:.1%} of the prompt tokens were in the prefix cache, so this run does not measure new prompts. "
        "Use a seed that this server has not seen, or none."
    ]


#: The warning about a dataset with fewer prompts than were sent.
REPEATED = "The dataset has fewer prompts than were sent: repeated ones hit the prefix cache."


def vocab_size(config: Mapping[str, Any]) -> int | None:
    """Return the vocabulary size in a config.json, at the top level or in ``text_config``, or None."""
    size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    return size if isinstance(size, int) and size > 0 else None


def input_tokens(requests: Sequence[WorkloadRequest]) -> list[int | None]:
    """Return the prompt lengths in tokens; None for prompts that are text."""
    return [len(request.prompt) if isinstance(request.prompt, list) else None for request in requests]
