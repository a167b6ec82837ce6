"""A model of the runtime as lm-eval calls it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from aiakq.arguments.checkpoint import EvalArguments
from aiakq.runtime.llm import LLM
from aiakq.runtime.protocol.sampling_params import SamplingParams

#: Prompts given to the engine at a time.
_PROMPTS = 256
#: Tokens generated where a task sets no limit.
_MAX_TOKENS = 256
#: Context ids, ids whose probability is wanted.
Pair = tuple[list[int], list[int]]


class EngineMethods:
    """The methods of lm-eval's ``TemplateLM`` that score and continue prompts, by the engine.

    Tokenization is that of lm-eval's ``hf`` model.
    """

    def __init__(self, llm: LLM) -> None:
        super().__init__()
        self.llm, self.tokenizer = llm, llm.get_tokenizer()
        self.max_length = llm.config.max_model_len
        # As lm-eval does: Gemma's predictions are useless without the first token.
        self.add_bos_token = "gemma" in llm.config.model.raw.get("model_type", "").lower()

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                chat_history, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:
        special = self.add_bos_token if add_special_tokens is None else add_special_tokens
        ids: list[int] = self.tokenizer(string, add_special_tokens=special, verbose=False)["input_ids"]
        return ids

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        totals = []
        for request in requests:
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0], add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length - 1,  # and the token before it
                context_len=1,
            )
            pairs = [make_disjoint_window(window) for window in windows]
            totals.append(sum(score for score, _ in self._scores(pairs)))
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        texts: list[str] = []
        for part in _batches(requests):
            prompts, params = [], []
            for request in part:
                context, given = request.args
                stops, most, sampling = generation_limits(given)
                most = min(most, self.max_length - 1)
                prompts.append(self.tok_encode(context)[-(self.max_length - most) :])
                params.append(SamplingParams(max_tokens=most, stop=stops or None, **sampling))
            outputs = self.llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
            texts += [output.outputs[0].text for output in outputs]
        return texts

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[object, list[int], list[int]]], **_: object
    ) -> list[tuple[float, bool]]:
        return self._scores([(context, wanted) for _, context, wanted in requests])

    def _scores(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        """Return, for each pair, the log-probability of its second part and whether that is what is most likely."""
        params = SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=0, detokenize=False)
        scores: list[tuple[float, bool]] = []
        for part in _batches(pairs):
            # Longer prompts lose their beginning.
            prompts = [(context + wanted)[-self.max_length :] for context, wanted in part]
            outputs = self.llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
            for output, prompt, (_, wanted) in zip(outputs, prompts, part, strict=True):
                assert output.prompt_logprobs is not None, "they were asked for"
                start = max(1, len(prompt) - len(wanted))
                total, greedy = 0.0, True
                for token, entry in zip(prompt[start:], output.prompt_logprobs[start:], strict=True):
                    assert entry is not None, "only the first token has none"
                    total, greedy = total + entry[token].logprob, greedy and entry[token].rank == 1
                scores.append((total, greedy))
        return scores


def load_lm_eval_model(model: str, options: EvalArguments) -> Any:
    """Load a model for lm-eval, a ``TemplateLM``, with the dtypes, device and tokenizer of ``options``."""
    from lm_eval.api.model import TemplateLM

    names = ("dtype", "kv_cache_dtype", "device", "tokenizer")
    settings = {name: getattr(options, name) for name in names}
    kind = type("LmEvalModel", (EngineMethods, TemplateLM), {})
    return kind(LLM(model, cpu_math="exact", **settings))


def _batches(requests: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Divide requests into parts that the engine takes at a time."""
    for start in range(0, len(requests), _PROMPTS):
        yield requests[start : start + _PROMPTS]


def generation_limits(given: Mapping[str, Any]) -> tuple[list[str], int, dict[str, Any]]:
    """Return the stop strings, the maximum number of tokens and the sampling settings in ``generation_kwargs``.

    Generation is greedy unless the task sets ``do_sample``.
    """
    until = given.get("until") or []
    stops = [until] if isinstance(until, str) else [text for text in until if text]
    names = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
    most = next((int(given[name]) for name in names if given.get(name)), _MAX_TOKENS)
    if not given.get("do_sample", False):
        return stops, most, {"temperature": 0.0}
    kept = ("temperature", "top_p", "top_k", "min_p", "seed")
    return stops, most, {name: given[name] for name in kept if given.get(name) is not None}
