"""SchedulerConfig: limits on the sequences and tokens of a step. Standard library only, without torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from aiakq.arguments.argument import part_of
from aiakq.arguments.engine import EngineArguments, SchedulerArguments
from aiakq.errors import error
from aiakq.runtime.config.lora import LoraConfig
from aiakq.runtime.speculation.config import SpeculationConfig

#: Rows of logits with draft tokens, unless more sequences run: as they cost memory, and more never pay.
_MAX_DRAFT_ROWS = 64


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(SchedulerArguments):
    """Limits and policy of the scheduler: its arguments, with defaults resolved.

    long_prompt_tokens  a prompt with more uncomputed tokens counts as long; 0 if none does. It equals
                        ``long_prefill_token_threshold``, or a fraction of the context with concurrent partial prefills.
    num_stages          number of pipeline stages, and so of steps in flight.
    speculation         settings of speculative decoding; None without it.
    lora                limits on LoRA adapters; None if LoRA is disabled.
    encoder_cache_tokens  tokens of images whose embeddings are kept; 0 for a model that reads text only.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    async_scheduling: bool = False
    long_prompt_tokens: int = 0
    num_stages: int = 1
    speculation: SpeculationConfig | None = None
    lora: LoraConfig | None = None
    encoder_cache_tokens: int = 0

    @property
    def num_drafts(self) -> int:
        """The maximum number of draft tokens of a sequence in a step."""
        return 0 if self.speculation is None else self.speculation.num_speculative_tokens

    @property
    def max_rows(self) -> int:
        """Rows of logits in a step: one per sequence, and those of draft tokens."""
        every = self.max_num_seqs * (1 + self.num_drafts)
        return max(self.max_num_seqs, min(every, _MAX_DRAFT_ROWS))

    @staticmethod
    def from_args(
        args: EngineArguments,
        max_model_len: int,
        on_cpu: bool,
        is_recurrent: bool = False,
        reads_both_ways: bool = False,
    ) -> SchedulerConfig:
        """is_recurrent: whether the model has recurrent layers, which need states for every running sequence.
        reads_both_ways: whether it is an encoder, whose texts are computed in one step each.

        Raises ``option_conflict`` for limits that do not go together."""
        if reads_both_ways:
            args = _with_whole_prompts(args, max_model_len)
        _check_partial_prefills(args)
        # vLLM's default for concurrent partial prefills.
        share = int(max_model_len * 0.04) if args.max_num_partial_prefills > 1 else 0
        speculation = SpeculationConfig.from_args(args, is_recurrent)
        settled = {
            "max_num_seqs": args.max_num_seqs or (32 if is_recurrent else 128 if on_cpu else 256),
            "max_num_batched_tokens": _max_num_batched_tokens(args, max_model_len, on_cpu),
            "long_prompt_tokens": args.long_prefill_token_threshold or share,
            "async_scheduling": _async_scheduling(args, on_cpu),
            "num_stages": args.pipeline_parallel_size,
            "speculation": speculation,
            "lora": LoraConfig.from_args(args),
        }
        return SchedulerConfig(**part_of(SchedulerConfig, args) | settled)


def _with_whole_prompts(args: EngineArguments, max_model_len: int) -> EngineArguments:
    """Return the arguments of an encoder, whose prompts are never split. Raises ``option_conflict``."""
    budget = args.max_num_batched_tokens
    if budget and budget < max_model_len:
        raise error(
            "option_conflict",
            option=f"--max-num-batched-tokens {budget}",
            other="an encoder",
            reason=f"it computes a text of up to {max_model_len} tokens in one step",
            hint=f"Raise it to {max_model_len}, or lower --max-model-len.",
        )
    return replace(args, enable_chunked_prefill=False, max_num_partial_prefills=1, max_long_partial_prefills=1)


def _async_scheduling(args: EngineArguments, on_cpu: bool) -> bool:
    """Whether steps are scheduled asynchronously. Raises ``option_conflict`` with pipeline parallelism."""
    if args.pipeline_parallel_size == 1:
        return not on_cpu if args.async_scheduling is None else args.async_scheduling
    if args.async_scheduling:
        raise error(
            "option_conflict",
            option="--async-scheduling",
            other=f"--pipeline-parallel-size {args.pipeline_parallel_size}",
            reason="there, steps of other sequences run meanwhile",
            hint="Leave it out.",
        )
    return False


def _max_num_batched_tokens(args: EngineArguments, max_model_len: int, on_cpu: bool) -> int:
    """Return the maximum tokens per step. Raises ``option_conflict`` if a prompt must fit into one step but may not."""
    budget = args.max_num_batched_tokens or (512 if on_cpu else 8192)
    if args.enable_chunked_prefill or budget >= max_model_len:
        return budget
    if args.max_num_batched_tokens:
        raise error(
            "option_conflict",
            option="--no-enable-chunked-prefill",
            other=f"--max-num-batched-tokens {budget}",
            reason=f"a prompt may have {max_model_len} tokens and must then fit into one step",
            hint=f"Raise it to {max_model_len}, or lower --max-model-len.",
        )
    return max_model_len


def _check_partial_prefills(args: EngineArguments) -> None:
    partial, long = args.max_num_partial_prefills, args.max_long_partial_prefills
    if partial > 1 and not args.enable_chunked_prefill:
        raise error(
            "option_conflict",
            option=f"--max-num-partial-prefills {partial}",
            other="--no-enable-chunked-prefill",
            reason="prompts are then never split",
            hint="Leave one out.",
        )
    if long > partial:
        raise error(
            "option_conflict",
            option=f"--max-long-partial-prefills {long}",
            other=f"--max-num-partial-prefills {partial}",
            reason="long prompts are some of all",
            hint=f"At most {partial} is possible.",
        )
