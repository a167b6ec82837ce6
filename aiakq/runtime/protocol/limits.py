"""ModelLimits: what every request is checked against."""

from __future__ import annotations

from dataclasses import dataclass, field

from aiakq.errors import AiakqError, error
from aiakq.runtime.protocol.grammar import GrammarDefaults
from aiakq.runtime.protocol.pooling_params import PoolingLimits


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

    @property
    def task(self) -> str:
        """The model's task: generate, embed, classify, score or reward."""
        return "generate" if self.pooling is None else self.pooling.task

    def check_generates(self) -> None:
        """Raise ``task_mismatch`` if the model pools prompts instead of generating text."""
        if self.pooling is not None:
            raise error("task_mismatch", task=self.task, wanted="continue texts", needed="generate")

    def pools(self) -> PoolingLimits:
        """Return how prompts are pooled. Raises ``task_mismatch`` for a model that generates text."""
        if self.pooling is None:
            raise error(
                "task_mismatch", task="generate", wanted="return embeddings or scores", needed="embed or classify"
            )
        return self.pooling

    def too_long(self, param: str, prompt: int | str, wanted: int) -> AiakqError:
        """Return the error for a prompt of ``prompt`` tokens, with ``wanted`` tokens to generate, none for pooling."""
        limit = min(self.max_model_len, self.max_kv_tokens)
        more, lower = (f" and asks for {wanted} more", ", lower max_tokens") if wanted else ("", "")
        return error("context_length_exceeded", param=param, prompt=prompt, more=more, lower=lower, limit=limit)
