"""ModelLimits: what every request is checked against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from aiakq.errors import AiakqError, error
from aiakq.runtime.protocol.grammar import GrammarDefaults
from aiakq.runtime.protocol.media import MediaKind, MediaLimits
from aiakq.runtime.protocol.pooling_params import Pooling, PoolingLimits
from aiakq.runtime.protocol.request import DEFAULT_OPTIONS, RequestOptions, RequestSpec
from aiakq.runtime.protocol.sampling_params import SamplingParams
from aiakq.runtime.protocol.transcripts import SpeechLimits

#: Kind of media -> what makes a prompt with them shorter.
_SHORTER: Mapping[MediaKind, str] = {
    "image": "send fewer or smaller images",
    "video": "send fewer or smaller frames",
    "audio": "send fewer or shorter audios",
}
#: Of models that read nothing but text.
TEXT_ONLY = MediaLimits("only text is read")


@dataclass(frozen=True)
class AdapterLimits:
    """Limits and layer sizes against which the adapters of requests are checked.

    max_loras   different ones in a step.
    modules     the linear layers of the model that may be adapted: name -> outputs N and inputs K.
    widths      MLP widths that were padded since adapters were trained: key of config.json -> before and after.
    model_type  of config.json, of its text part if it has one.
    """

    max_rank: int
    max_bytes: int | None = None
    max_loras: int = 1
    modules: dict[str, tuple[int, int]] = field(default_factory=dict)
    widths: dict[str, tuple[int, int]] = field(default_factory=dict)
    model_type: str = ""


@dataclass(frozen=True)
class ModelLimits:
    """The limits that every request is validated against.

    vocab_size      width of the logits: every token id is in 0 .. vocab_size - 1.
    max_model_len   maximum number of tokens of prompt plus output.
    max_kv_tokens   number of tokens that the whole page pool holds; a longer request could never run.
    max_logprobs    maximum number of log-probabilities per position.
    eos_token_ids   token ids that end a sequence.
    max_new_tokens  limit on the number of generated tokens of every request; None for no limit.
    by_priority     whether requests may have a priority.
    grammars        defaults of structured output.
    pooling         how prompts are pooled; None for a model that generates text.
    adapters        limits on LoRA adapters; None if LoRA is disabled.
    media           what prompts may have besides text.
    short_context   see ``ModelConfig.short_context``.
    speech          what a model that transcribes audio accepts; None for all others.
    """

    vocab_size: int
    max_model_len: int
    max_kv_tokens: int
    max_logprobs: int = 20
    eos_token_ids: tuple[int, ...] = ()
    max_new_tokens: int | None = None
    by_priority: bool = False
    grammars: GrammarDefaults = GrammarDefaults()
    pooling: PoolingLimits | None = None
    adapters: AdapterLimits | None = None
    media: MediaLimits = TEXT_ONLY
    short_context: int | None = None
    speech: SpeechLimits | None = None

    @property
    def longest(self) -> int:
        """The maximum number of tokens of a request."""
        return min(self.max_model_len, self.max_kv_tokens)

    @property
    def generates(self) -> bool:
        """Whether the model generates text, also of audio; else it pools prompts."""
        return self.pooling is None

    def check_task(self, request: RequestOptions, prompt_token_ids: list[int]) -> None:
        """Raise ``task_mismatch`` for a request of another kind, ``value_out_of_range`` for too many pooled rows."""
        if request.pooling is None:
            if self.speech is None:
                self.check_generates()
        else:
            self.pools().check_rows(request.pooling.num_rows(prompt_token_ids), "prompt")

    def shortest_request(self, request_id: str) -> RequestSpec:
        """Return the shortest request that the model can run."""
        options = DEFAULT_OPTIONS if self.generates else RequestOptions(pooling=Pooling("LAST"))
        token = self.eos_token_ids[0] if self.eos_token_ids else 0
        params = SamplingParams(temperature=0.0)
        return RequestSpec(request_id, [token], params, int(self.generates), 0, options=options)

    @property
    def task(self) -> str:
        """The model's task: generate, transcription, embed, classify, score or reward."""
        if self.speech is not None:
            return "transcription"
        return "generate" if self.pooling is None else self.pooling.task

    def check_generates(self) -> None:
        """Raise ``task_mismatch`` if the model pools prompts or transcribes audio instead of continuing text."""
        if self.task != "generate":
            raise error("task_mismatch", task=self.task, wanted="continue texts", needed="generate")

    def pools(self) -> PoolingLimits:
        """Return how prompts are pooled. Raises ``task_mismatch`` for a model that generates text."""
        if self.pooling is None:
            raise error(
                "task_mismatch", task=self.task, wanted="return embeddings or scores", needed="embed or classify"
            )
        return self.pooling

    def transcribes(self) -> SpeechLimits:
        """Return what is accepted besides text. Raises ``task_mismatch`` for a model that does not transcribe."""
        if self.speech is None:
            raise error("task_mismatch", task=self.task, wanted="transcribe audio", needed="transcription")
        return self.speech

    def too_long(self, param: str, prompt: int | str, wanted: int, media: MediaKind | None = None) -> AiakqError:
        """Return the error for a prompt of ``prompt`` tokens, with ``wanted`` tokens to generate, none for pooling.

        media  the kind of an item in it; None without one.
        """
        limit = self.longest
        more, lower = (f" and asks for {wanted} more", ", lower max_tokens") if wanted else ("", "")
        otherwise = "set truncate_prompt_tokens" if media is None else _SHORTER[media]
        fields = {"prompt": prompt, "more": more, "lower": lower, "limit": limit, "otherwise": otherwise}
        return error("context_length_exceeded", param=param, **fields)
