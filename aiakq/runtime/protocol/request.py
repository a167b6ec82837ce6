"""A request on its way: ``Request`` as a client sends it, ``RequestSpec`` as the engine runs one of its sequences.

``Request`` is built by a route of the server or by ``LLM`` and passed on whole; ``protocol.admission.admit`` makes a
``RequestSpec`` of each of its sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from aiakq.constraints import Constraint
from aiakq.runtime.protocol.adapters import AdapterRef
from aiakq.runtime.protocol.grammar import Grammar
from aiakq.runtime.protocol.media import MediaItem
from aiakq.runtime.protocol.pooling_params import Pooling
from aiakq.runtime.protocol.sampling_params import SamplingParams
from aiakq.runtime.protocol.thought_budget import ThoughtBudget
from aiakq.runtime.protocol.transcripts import TranscriptRules

PRIORITY = Constraint(type=int, low=-(2**31), high=2**31 - 1, expected="a 32-bit integer")


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a client asks for besides its prompts and sampling parameters. The record travels from the route to the
    engine.

    priority    scheduling priority; smaller values are scheduled first.
    cache_salt  prefix cache pages are shared only between requests with the same salt.
    client      client that the request belongs to; steps are shared between clients (``StepBuilder``).
    pooling     how prompts are pooled, for requests that generate nothing.
    adapter     LoRA adapter; validated by ``runtime.lora.requests``.
    rules       which tokens a transcript may have; None for other texts.
    """

    priority: int = 0
    cache_salt: str = ""
    client: str = ""
    pooling: Pooling | None = None
    adapter: AdapterRef | None = None
    rules: TranscriptRules | None = None

    @property
    def page_scope(self) -> dict[str, str]:
        """What requests must have in common to share pages, by kind; the server mixes the API key into the salt."""
        return {"cache salt": self.cache_salt, "adapter": "" if self.adapter is None else self.adapter.key}

    @property
    def reads_every_token(self) -> bool:
        """Whether the model's output for every token of the prompt is needed."""
        return self.pooling is not None and self.pooling.reads_every_token


DEFAULT_OPTIONS = RequestOptions()


@dataclass(frozen=True)
class Prompt:
    """One tokenized prompt. ``text`` is None when the client sent token ids; ``thought`` is the budget behind it.

    media        its images, in order, or its audio.
    second_text  index of the first token of the second text of a pair; 0: there is none, or no segment of its own.
    num_unread   number of tokens at its end that no token attends to, of encoders.
    """

    text: str | None
    token_ids: list[int]
    thought: ThoughtBudget | None = None
    media: tuple[MediaItem, ...] = ()
    second_text: int = 0
    num_unread: int = 0


@dataclass(frozen=True)
class Request:
    """One or several prompts with the same parameters.

    options              what the engine gets of it besides prompts and sampling parameters.
    arrival_time         seconds on ``time.monotonic``.
    final_only           whether the reader wants only the complete output, not increments.
    bad_words            ``bad_word_ids`` of ``params.bad_words``; tokenized later if None.
    kept_special_tokens  special tokens that are kept in the text even if special tokens are skipped.
    within_context       reduce a ``max_tokens`` that exceeds the context length, instead of refusing it.
    """

    id: str
    prompts: Sequence[Prompt]
    params: SamplingParams
    options: RequestOptions = DEFAULT_OPTIONS
    arrival_time: float = 0.0
    final_only: bool = False
    bad_words: Sequence[list[int]] | None = None
    kept_special_tokens: frozenset[int] = frozenset()
    within_context: bool = False


class RequestSpec(msgspec.Struct, frozen=True):
    """One sequence to generate or pool, with validated fields. Created by ``admit`` only.

    sampling         sampling parameters of the request, without ``logits_processors``, which cannot be encoded, and
                     without structured outputs, which ``grammar`` replaces.
    max_tokens       maximum number of tokens to generate; 0 only scores the prompt.
    seed             seed of the sequence: the request's plus the index of the sequence, or a random one. It is fixed,
                     so that a preempted sequence is regenerated identically.
    eos_token_ids    token ids that end the sequence with ``stop_reason`` None; empty with ignore_eos.
    bad_word_ids     ``sampling.bad_words`` as sequences of token ids that must not occur in the output.
    options          what the client asks for, the same for all sequences of a request.
    grammar          grammar that the generated text has to match.
    thought          the longest thought, and how it is ended.
    group            the same for all sequences of a request, and for no other request; "" if it has only one.
    media            images of the prompt, in order, or its audio.
    is_short         whether prompt and output fit in the original context of a model with LongRoPE, which rotates the
                     queries and keys of such texts by other angles.
    second_text, num_unread  see ``Prompt``.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    max_tokens: int
    seed: int
    eos_token_ids: list[int] = []
    bad_word_ids: list[list[int]] = []
    options: RequestOptions = DEFAULT_OPTIONS
    grammar: Grammar | None = None
    thought: ThoughtBudget | None = None
    group: str = ""
    media: tuple[MediaItem, ...] = ()
    is_short: bool = False
    second_text: int = 0
    num_unread: int = 0

    @property
    def page_scope(self) -> dict[str, str]:
        """What sequences must have in common to share pages, by kind."""
        heard = self.media[0].key if self.media and self.media[0].num_states else ""
        return {**self.options.page_scope, "context": "short" if self.is_short else "", "audio": heard}
