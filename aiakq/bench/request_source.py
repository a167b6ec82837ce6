"""RequestSource: an endless supply of a workload's requests in the form that an endpoint accepts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from aiakq.bench.client import Endpoint
from aiakq.bench.local_tokenizer import LocalTokenizer
from aiakq.bench.workload import Workload, WorkloadRequest
from aiakq.errors import error


@dataclass(frozen=True)
class RequestSource:
    """Prepares the requests of a workload for ``endpoint``.

    workload    generates requests, or None to repeat the requests passed to ``endless``.
    vocab_size  vocabulary size of the model, or None if unknown.
    tokenizer   turns token ids into text for chat.
    adapters    model names that requests are assigned to round-robin.
    """

    endpoint: Endpoint
    workload: Workload | None = None
    vocab_size: int | None = None
    tokenizer: LocalTokenizer | None = None
    adapters: Sequence[str] = ()

    def batch(self) -> list[WorkloadRequest]:
        """Return one batch of the workload's requests. Raises ``usage`` if they cannot be generated."""
        assert self.workload is not None
        return self.prepared(self.workload.requests(self.vocab_size))

    def prepared(self, requests: Sequence[WorkloadRequest]) -> list[WorkloadRequest]:
        """Return ``requests`` for the endpoint, with text for chat and adapters assigned.

        Raises ``usage`` if chat needs a tokenizer to turn token ids into text and there is none.
        """
        prepared = _as_text(requests, self.endpoint, self.tokenizer)
        if not self.adapters:
            return prepared
        models: list[str] = []
        for request, name in zip(prepared, itertools.cycle(self.adapters), strict=False):
            # A conversation stays on one model.
            models.append(name if request.follows is None else models[request.follows])
        return [replace(request, model=name) for request, name in zip(prepared, models, strict=True)]

    def endless(self, first: Sequence[WorkloadRequest]) -> Iterator[WorkloadRequest]:
        """Yield ``first``, then further batches; without a workload, ``first`` repeatedly."""
        while True:
            yield from first
            if self.workload is not None:
                first = self.batch()


def _as_text(
    requests: Sequence[WorkloadRequest], endpoint: Endpoint, tokenizer: LocalTokenizer | None
) -> list[WorkloadRequest]:
    if not endpoint.is_chat or all(request.messages or isinstance(request.prompt, str) for request in requests):
        return list(requests)
    if tokenizer is None:
        raise error(
            "usage",
            reason="The chat API takes text, not token ids, and the model's tokenizer is not on this machine.",
            hint="Give --tokenizer DIR, or --dataset FILE.",
        )
    return [_with_text(request, tokenizer) for request in requests]


def _with_text(request: WorkloadRequest, tokenizer: LocalTokenizer) -> WorkloadRequest:
    # A later turn of a conversation contributes only its new message; the earlier ones are its history.
    own = request.prompt if request.message is None else request.message
    return replace(request, prompt=tokenizer.text_of(own)) if isinstance(own, list) else request
