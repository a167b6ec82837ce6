"""RequestSource: the requests of a workload in the form that an endpoint takes, without end."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from aiakq.bench.client import Endpoint
from aiakq.bench.local_tokenizer import LocalTokenizer
from aiakq.bench.workload import Request, Workload
from aiakq.errors import error


@dataclass(frozen=True)
class RequestSource:
    """Requests for ``endpoint``, of a workload or of a list.

    workload    makes requests; None: ``requests`` are repeated.
    vocab_size  of the model; None where it is not known.
    tokenizer   turns token ids into text for chat.
    adapters    names of models; each request goes to one of them, in turn.
    """

    endpoint: Endpoint
    workload: Workload | None = None
    vocab_size: int | None = None
    tokenizer: LocalTokenizer | None = None
    adapters: Sequence[str] = ()

    def batch(self) -> list[Request]:
        """The requests of the workload, once. Raises ``usage`` if something is missing to make them."""
        assert self.workload is not None
        return self.prepared(self.workload.requests(self.vocab_size))

    def prepared(self, requests: Sequence[Request]) -> list[Request]:
        """``requests`` for the endpoint. Raises ``usage`` for chat if no tokenizer can turn token ids into text."""
        found = _as_text(requests, self.endpoint, self.tokenizer)
        if not self.adapters:
            return found
        models: list[str] = []
        for request, name in zip(found, itertools.cycle(self.adapters), strict=False):
            # A conversation stays with its model.
            models.append(name if request.follows is None else models[request.follows])
        return [replace(request, model=name) for request, name in zip(found, models, strict=True)]

    def endless(self, first: Sequence[Request]) -> Iterator[Request]:
        """``first``, then further batches; without a workload ``first`` again and again."""
        while True:
            yield from first
            if self.workload is not None:
                first = self.batch()


def _as_text(requests: Sequence[Request], endpoint: Endpoint, tokenizer: LocalTokenizer | None) -> list[Request]:
    if not endpoint.is_chat or all(request.messages or isinstance(request.prompt, str) for request in requests):
        return list(requests)
    if tokenizer is None:
        raise error(
            "usage",
            reason="Chat takes no token ids, and the model's tokenizer is not on this machine.",
            hint="Give --tokenizer DIR, or --dataset FILE.",
        )
    return [_with_text(request, tokenizer) for request in requests]


def _with_text(request: Request, tokenizer: LocalTokenizer) -> Request:
    # Of what follows an answer only the new part is sent: the rest are the messages before it.
    own = request.prompt if request.message is None else request.message
    return replace(request, prompt=tokenizer.text_of(own)) if isinstance(own, list) else request
