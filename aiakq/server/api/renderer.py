"""Renderer: turns texts and conversations into prompts, as the model's tokenizer and chat template define them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

from aiakq.errors import AiakqError, error
from aiakq.runtime.protocol.limits import ModelLimits
from aiakq.runtime.protocol.media import AS_CONFIGURED, MediaSettings, named_kinds
from aiakq.runtime.protocol.request import Prompt
from aiakq.runtime.protocol.sampling_params import SamplingParams
from aiakq.runtime.text.media_parts import take_media
from aiakq.runtime.text.output_processor import bad_word_texts, check_truncation, distinct_lists, truncated
from aiakq.server.api.message_parser import MessageFormat
from aiakq.server.api.request_media import RequestMedia, hold_media
from aiakq.server.api.service_options import ServiceOptions
from aiakq.server.api.unknown_fields import UnknownFields
from aiakq.server.process.text_client import TextClient
from aiakq.server.process.text_messages import TextReply, TextRequest

#: Texts of up to this many characters are tokenized even if a context of the longest tokens is shorter, because
#: tokenizers may drop characters.
MIN_PROMPT_CHARS = 1 << 16


class Renderer:
    """Renders and tokenizes prompts.

    text               workers that tokenize and render.
    tokenizer          tokenizer in this process; see ``TextClient``.
    limits             limits of the model.
    message_format     format of the model's reasoning and tool calls.
    template_defaults  arguments of the chat template, below those of a request.
    unknown_fields     handling of unknown request fields, and of arguments that the chat template does not use.
    """

    def __init__(
        self,
        text: TextClient,
        limits: ModelLimits,
        message_format: MessageFormat,
        options: ServiceOptions,
        on_ignored: Callable[[], None],
    ) -> None:
        """on_ignored: called for every unknown field of a request that is ignored."""
        self.text = text
        self.tokenizer = text.tokenizer
        self.limits = limits
        self.message_format = message_format
        self.template_defaults = options.template_kwargs
        self.unknown_fields = UnknownFields(options.unknown_fields, on_ignored)
        self._media = RequestMedia(options.media_path, options.media_domains)
        self.thought_end_ids: list[int] | None = None  # tokens of the text that ends thoughts, once they are needed

    async def tokenize_prompts(
        self, prompts: Sequence[str | list[int]], add_special_tokens: bool, params: SamplingParams
    ) -> list[Prompt]:
        """Tokenize the prompts that are text, and apply ``truncate_prompt_tokens``.

        Raises context_length_exceeded for a text that cannot fit, no_tokenizer and tokenization.
        """
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        encoded: list[Prompt] = []
        if texts:
            request = self._limited(TextRequest(0, texts=texts, add_special_tokens=add_special_tokens), params)
            self._check_length(max(map(len, texts)), request, params)
            encoded = self._prompts(texts, await self.text.run(request), request, params)
        token_lists = iter(encoded)
        return self.truncate_prompts(
            [next(token_lists) if isinstance(prompt, str) else Prompt(None, prompt) for prompt in prompts], params
        )

    async def tokenize_infill(
        self, prefixes: Sequence[str | list[int]], suffix: str, add_special_tokens: bool, params: SamplingParams
    ) -> list[Prompt]:
        """Build fill-in-the-middle prompts from each prefix and ``suffix``, and add their stop tokens to ``params``.

        Raises as ``tokenize_prompts``, and unsupported_parameter if the model does not support it.
        """
        infill = self.text.loaded.infill
        if infill is None:
            reason = "the model's tokenizer has no tokens for filling in the middle"
            raise error("unsupported_parameter", param="suffix", reason=reason)
        before = await self.tokenize_prompts(prefixes, False, params)
        [after] = await self.tokenize_prompts([infill.lead + suffix], False, SamplingParams())
        params.stop_token_ids = list({*(params.stop_token_ids or ()), *infill.ends})
        return [Prompt(None, infill.prompt(each.token_ids, after.token_ids, add_special_tokens)) for each in before]

    async def tokenize_pairs(self, pairs: Sequence[tuple[str, str]], params: SamplingParams) -> list[Prompt]:
        """Tokenize pairs of texts, each to one prompt, like ``tokenize_prompts``."""
        request = self._limited(TextRequest(0, pairs=list(pairs)), params)
        self._check_length(max(len(one) + len(two) for one, two in pairs), request, params)
        reply = await self.text.run(request)
        return self.truncate_prompts(self._prompts([None] * len(pairs), reply, request, params), params)

    async def cut_texts(self, texts: Sequence[str], max_tokens: int) -> list[str]:
        """Cut each text after ``max_tokens`` tokens, see ``cut_text``."""
        return (await self.text.run(TextRequest(0, texts=list(texts), cut_to=max_tokens))).texts

    def check_calls_tools(self, is_forced: bool) -> None:
        """Raise ``unsupported_parameter`` if the server does not enable tool calls.

        is_forced  whether the request forces a call, which needs no --enable-auto-tool-choice.
        """
        if not (is_forced or self.message_format.auto_tool_choice):
            reason = "the server was started without --enable-auto-tool-choice, so the model cannot decide; "
            reason += "use tool_choice 'none', 'required' or a named function"
            raise error("unsupported_parameter", param="tools", reason=reason)

    @property
    def chat_template(self) -> str:
        """Chat template for conversations with tools; "" if there is none."""
        return self.text.loaded.tools_template

    @cached_property
    def kept_special_tokens(self) -> frozenset[int]:
        """Special tokens that mark reasoning or tool calls."""
        return self.message_format.special_tokens(self.tokenizer)

    def template_arguments(self, given: Mapping[str, object]) -> dict[str, object]:
        """Return the arguments of the chat template that a request has ``given``, with the operator's defaults."""
        return {**self.template_defaults, **given}

    async def tokenize_chat(
        self,
        messages: list[dict[str, object]],
        template_kwargs: Mapping[str, object],
        add_special_tokens: bool,
        params: SamplingParams,
        settings: MediaSettings = AS_CONFIGURED,
    ) -> Prompt:
        """Render a conversation with the chat template and tokenize it, like ``tokenize_prompts``.

        Raises also no_chat_template and chat_template.
        """
        arguments = self.template_arguments(template_kwargs)
        request = await self.chat_request(messages, arguments, add_special_tokens, settings)
        if request.media and params.truncate_prompt_tokens is not None:
            reason = f"a prompt with {named_kinds(each.kind for each in request.media)} is not truncated"
            raise error("unsupported_parameter", param="truncate_prompt_tokens", reason=reason)
        reply = await self.text.run(self._limited(request, params))
        request.media = []
        hold_media(reply.media)
        self._check_length(reply.num_chars, request, params)
        return self.truncate_prompts(self._prompts([reply.text], reply, request, params), params)[0]

    async def chat_request(
        self,
        messages: list[dict[str, object]],
        arguments: dict[str, object],
        add_special_tokens: bool,
        settings: MediaSettings = AS_CONFIGURED,
    ) -> TextRequest:
        """Return the request to render and tokenize a conversation, with its media.

        Raises unsupported_parameter and media_refused for media that the model or the server does not read.
        """
        self.limits.media.check_settings(settings)
        bare, media = take_media(messages)
        return TextRequest(
            0,
            messages=bare,
            arguments=arguments,
            call_syntax=self.message_format.call_syntax,
            media=await self._media.read(media, self.limits.media) if media else [],
            media_settings=settings,
            add_special_tokens=add_special_tokens,
        )

    def truncate_prompts(self, prompts: list[Prompt], params: SamplingParams) -> list[Prompt]:
        """Apply ``truncate_prompt_tokens``."""
        if params.truncate_prompt_tokens is None:
            return prompts
        truncated_ids = [truncated(prompt.token_ids, params, self.limits) for prompt in prompts]
        return [
            prompt if len(token_ids) == len(prompt.token_ids) else Prompt(None, token_ids)
            for prompt, token_ids in zip(prompts, truncated_ids, strict=True)
        ]

    def _limited(self, request: TextRequest, params: SamplingParams) -> TextRequest:
        """Return ``request``, which tokenizes prompts, limited to as many token ids as can be used."""
        limits = self.limits
        longest = limits.longest
        check_truncation(params, limits)
        request.max_ids, request.from_start = longest + 1, params.truncation_side == "right"
        if limits.pooling is not None and limits.pooling.reads_both_ways:
            keep = params.truncate_prompt_tokens
            request.is_whole, request.cut_to_fit = True, longest if keep == -1 else keep
        if params.truncate_prompt_tokens is None and self.text.loaded.longest_token:
            request.max_chars = max(MIN_PROMPT_CHARS, longest * self.text.loaded.longest_token)
        return request

    def _check_length(self, num_chars: int, request: TextRequest, params: SamplingParams) -> None:
        """Raise ``context_length_exceeded`` for a text that cannot fit into the context, however it is tokenized."""
        if request.max_chars is not None and num_chars > request.max_chars:
            min_tokens = -(-num_chars // self.text.loaded.longest_token)
            raise self._too_long(f"at least {min_tokens}", params)

    def _prompts(
        self, texts: Sequence[str | None], reply: TextReply, request: TextRequest, params: SamplingParams
    ) -> list[Prompt]:
        prompts = []
        seconds = reply.second_texts or [0] * len(texts)
        for text, count, token_ids, second in zip(texts, reply.counts, reply.token_ids, seconds, strict=True):
            if count > len(token_ids) and params.truncate_prompt_tokens is None:
                raise self._too_long(count, params)
            if self._has_unknown_tokens:
                self._check_known(token_ids)
            shown = text if count == len(token_ids) else None
            prompts.append(Prompt(shown, token_ids, media=tuple(reply.media), second_text=second))
        return prompts

    @cached_property
    def _has_unknown_tokens(self) -> bool:
        """Whether the tokenizer has tokens beyond the model's vocabulary."""
        return self.tokenizer.vocab_size > self.limits.vocab_size

    def _check_known(self, token_ids: list[int]) -> None:
        """Raise ``tokenizer_mismatch`` for a token of a text that the model does not have."""
        last = self.limits.vocab_size - 1
        unknown = next((id for id in token_ids if id > last), None)
        if unknown is not None:
            [token] = self.tokenizer.raw_tokens([unknown])
            raise error("tokenizer_mismatch", token=token[:64], token_id=unknown, last=last)

    def _too_long(self, num_tokens: int | str, params: SamplingParams) -> AiakqError:
        limits = self.limits
        return limits.too_long("prompt", num_tokens, max(int(limits.generates), params.max_tokens or 0))

    async def bad_word_ids(self, params: SamplingParams) -> list[list[int]] | None:
        """Return the token ids of ``params.bad_words``, or None without bad words or tokenizer."""
        if not params.bad_words or not self.tokenizer.has_text:
            return None
        texts = bad_word_texts(params.bad_words)
        return distinct_lists((await self.text.encode(texts, add_special_tokens=False)).token_ids)

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the token ids of ``text``."""
        return (await self.text.encode([text], add_special_tokens)).token_ids[0]

    async def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        """Return the text of ``token_ids``."""
        request = TextRequest(0, token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return (await self.text.run(request)).text
