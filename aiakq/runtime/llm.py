"""LLM: offline inference from Python, in the calling process. Names and result shapes follow vLLM's offline API."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from aiakq.arguments.server import keywords, notices
from aiakq.errors import AiakqError, error, first_line
from aiakq.runtime.build.loading import load_engine
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.engine.loop import run, timed_step
from aiakq.runtime.lora.requests import AdapterRef, CheckedAdapters, LoRARequest
from aiakq.runtime.multimodal.offline import OfflineMedia, check_not_truncated
from aiakq.runtime.offline import OutputBuilder, RequestOutputBuilder
from aiakq.runtime.offline_checks import OfflineChecks
from aiakq.runtime.offline_prompts import Prompt, listed_prompts
from aiakq.runtime.pooling.offline import (
    PooledOutputBuilder,
    PoolingMethods,
    TextPair,
    late_prompt,
    whole_prompt,
    with_text_before,
)
from aiakq.runtime.protocol.command import Abort, Inbox, ResetPrefixCache
from aiakq.runtime.protocol.output import StepOutput
from aiakq.runtime.protocol.pooling_params import PoolingLimits, PoolingParams
from aiakq.runtime.protocol.request import Prompt as TokenizedPrompt
from aiakq.runtime.protocol.request import Request, RequestOptions
from aiakq.runtime.protocol.request_output import RequestOutput
from aiakq.runtime.protocol.sampling_params import SamplingParams
from aiakq.runtime.speech.offline import OfflineSpeech, TranscriptionMethods
from aiakq.runtime.text.output_processor import OutputProcessor, truncated
from aiakq.runtime.text.tokenizer import is_panic

Result = TypeVar("Result")
_Encoded = TypeVar("_Encoded")


class LLM(PoolingMethods, TranscriptionMethods):
    """A loaded model. ``LLM(model="folder", **arguments)``; the arguments are those of docs/arguments.md.

    Raises AiakqError for a model or an argument that cannot be used.
    """

    def __init__(self, model: str, **arguments: Any) -> None:
        arguments = keywords(arguments)
        self.config = EngineConfig.from_args({"model": model, **arguments})
        for line in notices(arguments):
            warnings.warn(line, stacklevel=2)
        self.tokenizer = self.config.tokenizer.load()
        if self.tokenizer.unused_template:
            warnings.warn(self.tokenizer.unused_template, stacklevel=2)
        self.tokenizer.check_growth()
        self._checks = OfflineChecks(self.tokenizer, arguments.get("reasoning_config"))
        self.engine = load_engine(self.config)
        if remark := self.engine.facts.get("generation_config.json"):
            warnings.warn(f"generation_config.json: {remark}.", stacklevel=2)
        self._checks.attach(self.engine)
        if self._checks.end_failure:
            warnings.warn(f"Structured output is refused: {self._checks.end_failure}.", stacklevel=2)
        self.engine.facts["tokenizer"] = self.tokenizer.describe()
        self._processor = OutputProcessor(self.tokenizer, self.engine.limits)
        self._adapters = CheckedAdapters(self.engine.limits.adapters)
        self._media = OfflineMedia(self.config, self.engine.limits.media, self.tokenizer)
        self._speech = OfflineSpeech(self.config, self.engine.limits)
        self._ids = itertools.count()

    def get_tokenizer(self) -> Any:
        """Return the transformers tokenizer. Raises ``no_tokenizer``."""
        if not self.tokenizer.has_text:
            raise error("no_tokenizer")
        return self.tokenizer.hf

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the default SamplingParams of requests: the defaults overridden by generation_config.json."""
        return SamplingParams.from_optional(**self.config.generation.sampling)

    def reset_prefix_cache(self) -> bool:
        """Clear the prefix cache; return True, as vLLM does on success."""
        timed_step(self.engine, [ResetPrefixCache()])
        return True

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        prompt_token_ids: list[int] | list[list[int]] | None = None,
        priority: int | Sequence[int] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Generate text for every prompt; results are in the order of the prompts.

        sampling_params  one for all, or one per prompt; defaults to ``get_default_sampling_params``.
        use_tqdm         show a progress bar on stderr.
        prompt_token_ids prompts as ids, instead of ``prompts``.
        priority         one for all, or one per prompt, lowest first; without an effect unless
                         scheduling_policy="priority".
        lora_request     one adapter for all, or one or None per prompt; needs enable_lora=True.
        If ``max_tokens`` exceeds the context, the text ends there with finish_reason "length".
        Raises AiakqError (also a ValueError) for an invalid prompt, before anything is generated.
        """
        if self.config.speech is None:
            self.engine.limits.check_generates()
        listed = listed_prompts(prompts if prompts is not None else prompt_token_ids)
        params, options = self._params_for(listed, sampling_params), self._options(listed, priority, lora_request)
        read = [self._read(prompt, f"prompts[{number}]") for number, prompt in enumerate(listed)]
        if self.config.speech is not None:
            options = [self._speech.with_rules(*each) for each in zip(read, options, strict=True)]
        return self._run(self._requests(read, params, options), RequestOutputBuilder, use_tqdm)

    def _pooling_limits(self) -> PoolingLimits:
        """See PoolingMethods."""
        return self.engine.limits.pools()

    def _pool(
        self,
        builder: Callable[[Request], PooledOutputBuilder[Result]],
        prompts: Sequence[Prompt | TextPair],
        params: PoolingParams | None,
        truncate_prompt_tokens: int | None,
        use_tqdm: bool,
    ) -> list[Result]:
        """See PoolingMethods."""
        limits = self._pooling_limits()
        params = params or PoolingParams()
        pooling, before = limits.resolve(params), limits.before(params)
        if before:
            prompts = [with_text_before(prompt, before) for prompt in prompts]
        nothing = SamplingParams(
            max_tokens=0,
            detokenize=False,
            truncate_prompt_tokens=truncate_prompt_tokens,
            truncation_side="right" if limits.reads_both_ways else None,
        )
        options = [RequestOptions(cache_salt=_salt(prompt), pooling=pooling) for prompt in prompts]
        read = [
            self._tokenized(late_prompt, self.tokenizer, prompt, params, self.engine.limits, truncate_prompt_tokens)
            or self._read_pooled(prompt, number, nothing)
            for number, prompt in enumerate(prompts)
        ]
        return self._run(self._requests(read, [nothing] * len(read), options), builder, use_tqdm)

    def chat(  # noqa: PLR0913  the parameters of vLLM
        self,
        messages: list[dict[str, object]] | list[list[dict[str, object]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: dict[str, object] | None = None,
        continue_final_message: bool = False,
        tools: Sequence[dict[str, object] | Callable[..., object]] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        chat_template_content_format: str = "auto",
        priority: int | Sequence[int] | None = None,
        mm_processor_kwargs: dict[str, object] | None = None,
    ) -> list[RequestOutput]:
        """Generate the next message of one or more conversations, with the model's chat template.

        continue_final_message  continue the last message; add_generation_prompt must be False.
        tools                   functions that the model may call, as in a chat request, or as Python functions with
                                annotations and docstrings. The output text contains the calls as the model writes them;
                                ``structured_outputs`` can enforce a format.
        lora_request, priority  as in ``generate``.
        chat_template_content_format  auto, or string or openai (a list of parts) to pass the content of messages to the
                                      template in this form.
        mm_processor_kwargs     arguments of the model's image and video processors, in addition to those of the engine.

        Raises ``usage``, the errors of ``Tokenizer.chat_prompt``, and as ``generate`` does.
        """
        self.engine.limits.check_generates()
        if continue_final_message and add_generation_prompt:
            hint = "Set add_generation_prompt=False."
            raise error("usage", reason="continue_final_message goes without a generation prompt.", hint=hint)
        conversations = _conversations_of(messages)
        arguments = (
            chat_template,
            tools,
            add_generation_prompt,
            chat_template_content_format,
            continue_final_message,
            chat_template_kwargs,
        )
        read = [self._read_chat(each, mm_processor_kwargs, *arguments) for each in conversations]
        texts = [prompt.text or "" for prompt in read]
        params, options = self._params_for(texts, sampling_params), self._options(texts, priority, lora_request)
        return self._run(self._requests(read, params, options), RequestOutputBuilder, use_tqdm)

    def _params_for(
        self, prompts: object, params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        return self._one_for_each("sampling_params", prompts, params)

    def _priorities(self, prompts: object, priority: int | Sequence[int] | None) -> list[int]:
        """Return the priority of each prompt; 0 for all if the scheduler does not use priorities."""
        given = self._one_for_each("priority", prompts, 0 if priority is None else priority)
        if self.engine.limits.by_priority or not all(type(each) is int for each in given):
            return given
        return [0] * len(given)

    @staticmethod
    def _one_for_each(name: str, prompts: Any, values: object) -> list[Any]:
        """Return ``values`` as a list with one entry per prompt.

        Raises ``invalid_type`` for entries of another type, ``usage`` for another number of them.
        """
        kind = _EACH[name]
        if isinstance(values, kind):
            return [values] * len(prompts)
        if not isinstance(values, (list, tuple)) or not all(isinstance(value, kind | None) for value in values):
            reason = f"{kind.__name__}, or a list with one for each prompt, is expected"
            raise error("invalid_type", param=name, reason=reason)
        if len(values) != len(prompts):
            raise error(
                "usage",
                reason=f"There are {len(prompts)} prompts but {len(values)} {name}.",
                hint="Give one for all, or one for each.",
            )
        return list(values)

    def _read_pooled(self, prompt: Prompt | TextPair, number: int, params: SamplingParams) -> TokenizedPrompt:
        """Tokenize a prompt that is pooled, which may be a pair of texts."""
        whole = self._tokenized(whole_prompt, self.tokenizer, prompt, params, self.engine.limits)
        if whole is not None:
            return whole
        if isinstance(prompt, TextPair):
            return TokenizedPrompt(None, self._tokenized(self.tokenizer.encode_pair, *prompt))
        return self._read(prompt, f"prompts[{number}]")

    def _read(self, prompt: Prompt, place: str) -> TokenizedPrompt:
        """Tokenize a prompt; ``place`` is its name in errors."""
        if isinstance(prompt, dict):
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            if ids is None:
                assert text is not None, "listed_prompts has checked it"
                ids = self._encoded(text) if self.config.speech is None else self._without_special_tokens(text)
            if self.config.speech is not None:
                return self._speech.prompt(prompt, list(ids), place)
            if media := self._media.of(prompt, place):
                kwargs = prompt.get("mm_processor_kwargs")
                return self._media.add(text, list(ids), media, f"{place}.prompt", kwargs)
            return TokenizedPrompt(text, list(ids))
        if isinstance(prompt, str):
            return TokenizedPrompt(prompt, self._encoded(prompt))
        return TokenizedPrompt(None, list(prompt))

    def _read_chat(
        self, messages: list[dict[str, object]], processor_kwargs: dict[str, object] | None, *arguments: Any
    ) -> TokenizedPrompt:
        """Render and tokenize a conversation."""
        media, placeholders = self._media.in_conversation(messages)
        text, ids = self._tokenized(self.tokenizer.chat_tokens, messages, *arguments, placeholders)
        if not media:
            return TokenizedPrompt(text, ids)
        return self._media.add(text, ids, media, "messages", processor_kwargs)

    def _new_request(self, prompt: TokenizedPrompt, params: SamplingParams, options: RequestOptions) -> Request:
        """See TranscriptionMethods."""
        return Request(str(next(self._ids)), [prompt], params, options, within_context=True)

    def _without_special_tokens(self, prompt: str) -> list[int]:
        """Tokenize a text that has all special tokens in it."""
        return self._tokenized(self.tokenizer.encode, prompt, False)

    def _encoded(self, prompt: str) -> list[int]:
        return self._tokenized(self.tokenizer.encode, prompt)

    @staticmethod
    def _tokenized(encode: Callable[..., _Encoded], *arguments: Any) -> _Encoded:
        """Call a function of the tokenizer. Raises ``tokenization`` for failures outside the registry."""
        try:
            return encode(*arguments)
        except AiakqError:
            raise
        except BaseException as failure:
            if not isinstance(failure, Exception) and not is_panic(failure):
                raise
            raise error("tokenization", reason=first_line(failure)) from failure

    def _options(
        self,
        prompts: Sequence[Prompt],
        priority: int | Sequence[int] | None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None,
    ) -> list[RequestOptions]:
        """Return the options of each prompt. Raises ``usage`` and the errors of adapters."""
        priorities = self._priorities(prompts, priority)
        adapters: list[AdapterRef | None] = [None] * len(prompts)
        if lora_request is not None:
            given = self._one_for_each("lora_request", prompts, lora_request)
            adapters = [None if adapter is None else self._adapters.of(adapter) for adapter in given]
        return [
            RequestOptions(priority=each, cache_salt=_salt(prompt), adapter=adapter)
            for prompt, each, adapter in zip(prompts, priorities, adapters, strict=True)
        ]

    def _requests(
        self,
        prompts: Sequence[TokenizedPrompt],
        params: list[SamplingParams],
        options: list[RequestOptions],
    ) -> list[Request]:
        """Return a request for each prompt. Raises the errors of grammars and of budgets of thoughts."""
        requests = []
        for prompt, each, option in zip(prompts, params, options, strict=True):
            check_not_truncated(prompt.media, each)
            ids = truncated(prompt.token_ids, each, self.engine.limits)
            if each.grammar is not None:
                self._checks.check_grammar(each)
            prompt = replace(prompt, token_ids=ids, thought=self._checks.thought_budget(ids, each))
            requests.append(Request(str(next(self._ids)), [prompt], each, option, within_context=True))
        return requests

    def _run(
        self, requests: list[Request], builder: Callable[[Request], OutputBuilder[Result]], use_tqdm: bool
    ) -> list[Result]:
        """Run ``requests`` of one prompt each; ``builder`` decides what each returns."""
        builders = {request.id: builder(request) for request in requests}
        inbox: Inbox = []
        with_processors: list[str] = []
        try:
            for request in requests:
                specs = self._processor.add(request.id, request.prompts[0], request)
                inbox += specs
                if request.params.logits_processors:
                    for spec in specs:
                        self._executor_with_functions().register_logits_processors(
                            spec.request_id, request.params.logits_processors
                        )
                        with_processors.append(spec.request_id)
            self._run_requests(inbox, builders, use_tqdm)
        except BaseException:
            # Abort the requests of a failed or interrupted call, so that they do not run in the next one.
            for request_id in builders:
                self._processor.cancel(request_id)
            self.engine.abort_all()
            raise
        finally:
            for request_id in with_processors:
                self._executor_with_functions().unregister_logits_processors(request_id)
        return [each.result() for each in builders.values()]

    def _executor_with_functions(self) -> Any:
        """Return the executor, if it can call functions of this process. Raises ``unsupported_parameter``."""
        if not hasattr(self.engine.executor, "register_logits_processors"):
            reason = "the model runs in another process, which functions cannot reach"
            raise error("unsupported_parameter", param="logits_processors", reason=reason)
        return self.engine.executor

    def _run_requests(self, inbox: Inbox, builders: Mapping[str, OutputBuilder[object]], use_tqdm: bool) -> None:
        """Run the requests in ``inbox`` until all are finished, and add their output to ``builders``."""
        from tqdm import tqdm

        def receive(idle: bool) -> Inbox | None:
            if idle and not inbox:
                return None
            taken = inbox[:]
            inbox.clear()
            return taken

        with tqdm(total=len(builders), desc="Processed prompts", disable=not use_tqdm) as bar:

            def deliver(step: StepOutput) -> None:
                for output in step.all_outputs():
                    deltas, aborts = self._processor.process(output)
                    if aborts:
                        inbox.append(Abort(aborts))
                    for delta in deltas:
                        bar.update(builders[delta.request_id].add(delta))

            run(self.engine, receive, deliver)


#: Parameters that are given for all prompts or for each -> the type of one.
_EACH: dict[str, type] = {"sampling_params": SamplingParams, "priority": int, "lora_request": LoRARequest}


def _conversations_of(messages: object) -> list[list[dict[str, object]]]:
    """Return the conversations of ``LLM.chat``. Raises ``invalid_type``."""
    conversations = (
        [messages] if isinstance(messages, list) and messages and isinstance(messages[0], dict) else messages
    )
    if not isinstance(conversations, (list, tuple)) or not conversations:
        raise error("invalid_type", param="messages", reason="a list of messages, or of such lists, is expected")
    for number, conversation in enumerate(conversations):
        each = isinstance(conversation, (list, tuple)) and all(isinstance(message, dict) for message in conversation)
        if not each or not conversation:
            place = "messages" if conversations == [messages] else f"messages[{number}]"
            reason = "a list of at least one message is expected, each a dict with role and content"
            raise error("invalid_type", param=place, reason=reason)
    return list(conversations)


def _salt(prompt: Prompt | TextPair) -> str:
    """Return the cache salt of a prompt."""
    return str(prompt.get("cache_salt") or "") if isinstance(prompt, dict) else ""
