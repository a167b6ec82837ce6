"""Loads the tokenizer, the chat templates, the grammar compiler and what reads media, in the tokenizer's process."""

from __future__ import annotations

import json
import resource
import signal
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from aiakq.errors import AiakqError, error, one_line
from aiakq.runtime.multimodal.audio_files import load_packages
from aiakq.runtime.multimodal.loading import MediaPreprocessors
from aiakq.runtime.multimodal.spectrogram import Spectrogram
from aiakq.runtime.structured.compiler import GrammarCompiler
from aiakq.runtime.structured.vocabulary import vocabulary_of
from aiakq.runtime.text.chat_template import ChatTemplate, template_of
from aiakq.runtime.text.infill import find_infill
from aiakq.runtime.text.template_facts import TemplateFacts
from aiakq.runtime.text.tokenizer import Tokenizer
from aiakq.server.process.template_checks import checked_template
from aiakq.server.process.text_messages import Loaded, Setup
from aiakq.system.channel import Failure
from aiakq.system.memory import limit_more_memory

#: Seconds of CPU time and bytes to load a tokenizer.
MAX_LOAD_SECONDS, MAX_LOAD_BYTES = 120, 8 << 30
#: Bytes that a worker may allocate in addition to its initial size, for a template.
MAX_TEMPLATE_BYTES = 512 << 20


def load_tokenizer(setup: Setup) -> tuple[Tokenizer, Templates, Loaded]:
    """Load the tokenizer and the chat templates, and describe them for the server.

    Raises as ``source.load`` and ``_load_templates``.
    """
    limit_more_memory(MAX_LOAD_BYTES)
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_LOAD_SECONDS, resource.RLIM_INFINITY))
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    tokenizer = setup.source.load()
    loaded = Loaded(description=tokenizer.describe(), longest_token=tokenizer.longest_token)
    pad = getattr(tokenizer.hf, "pad_token_id", None)
    loaded.pad_token_id = pad if type(pad) is int else None
    loaded.pads_left = getattr(tokenizer.hf, "padding_side", "right") == "left"
    hf, templates = tokenizer.hf, Templates()
    if setup.chat_template:
        tokenizer.check_takes_template("--chat-template")
    if hasattr(hf, "get_chat_template") and (setup.chat_template or tokenizer.has_chat_template):
        templates = _load_templates(setup, tokenizer, loaded)
    loaded.unused_template = "" if setup.chat_template else tokenizer.unused_template
    loaded.config = json.dumps(tokenizer.config(setup.chat_template)).encode()
    if hasattr(hf, "get_vocab"):
        loaded.infill = find_infill(tokenizer, hf.get_vocab())
    try:
        loaded.decoder = tokenizer.decoder_json()
    except ValueError as failure:
        file = f"the tokenizer in '{setup.source.folder}'"
        raise error("model_malformed", file=file, reason=str(failure)) from None
    resource.setrlimit(resource.RLIMIT_CPU, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return tokenizer, templates, loaded


@dataclass
class Templates:
    """The templates for conversations without and with tools; None for one that cannot be used."""

    plain: ChatTemplate | None = None
    with_tools: ChatTemplate | None = None

    @property
    def all(self) -> list[ChatTemplate]:
        """Those that can be used."""
        return [each for each in (self.plain, self.with_tools) if each is not None]


def _load_templates(setup: Setup, tokenizer: Tokenizer, loaded: Loaded) -> Templates:
    """Load the chat templates and describe them in ``loaded``.

    Raises ``template_unusable`` and ``template_loses_users`` for one of the operator, and ``template_form``.
    """
    loaded.has_template = True
    known: list[TemplateFacts | None] = setup.template_facts or [None, None]  # if the process was restarted
    found: list[ChatTemplate | None] = []
    for facts, with_tools in zip(known, (False, True), strict=True):
        template, failure = None, None
        try:
            template = _load_template(setup, tokenizer, facts, with_tools)
        except AiakqError as problem:
            if setup.chat_template or problem.id == "template_form":
                raise
            failure = Failure.of(problem)
        found.append(template)
        loaded.template_failures.append(failure)
        loaded.template_facts.append(None if template is None else template.facts)
    if tokenizer.encodes_chats:  # nothing renders the template
        loaded.template_failures = [None, None]
    loaded.tools_template = next((template.text for template in reversed(found) if template is not None), "")
    return Templates(*found)


def _load_template(setup: Setup, tokenizer: Tokenizer, facts: TemplateFacts | None, with_tools: bool) -> ChatTemplate:
    """Load one of the chat templates, which is checked unless its ``facts`` are known.

    Raises ``no_default_template``, and as ``checked_template``.
    """
    special_tokens = dict(getattr(tokenizer.hf, "special_tokens_map", {}))
    text = template_of(tokenizer.hf, setup.chat_template, with_tools)
    if facts is not None:
        return ChatTemplate(text, special_tokens, facts)
    source = setup.template_source if setup.chat_template else f"in '{setup.source.folder}'"

    def limit_memory() -> None:
        limit_more_memory(MAX_TEMPLATE_BYTES)

    arguments = setup.template_arguments
    return checked_template(text, special_tokens, setup.content_format, source, limit_memory, with_tools, arguments)


def new_compiler(tokenizer: Tokenizer, loaded: Loaded) -> GrammarCompiler | None:
    """Return the grammar compiler that all workers share. Sets the vocabulary of ``loaded``, or its failure."""
    try:
        vocabulary = vocabulary_of(tokenizer)
        loaded.vocabulary = msgspec.msgpack.encode(vocabulary)
        # End-of-sequence tokens matter only to the engine: this compiler only validates grammars.
        return GrammarCompiler(vocabulary.resized(len(vocabulary.tokens), []))
    except BaseException as failure:  # llguidance is written in Rust, and can panic
        reason = f"its tokenizer cannot be used for it ({one_line(failure)})"
        if isinstance(failure, AiakqError):
            reason = str(failure.fields.get("reason", reason))
        loaded.vocabulary, loaded.grammar_failure = b"", reason
        return None


def load_media(
    setup: Setup, tokenizer: Tokenizer, templates: Sequence[ChatTemplate], loaded: Loaded
) -> MediaPreprocessors | None:
    """Return what puts media into prompts, and give ``templates`` the placeholders.

    Returns None for a model that reads text only, and if it cannot be loaded: requests with media then fail with
    ``loaded.media_failures``, and others do not. Raises ``bad_option`` for arguments that its processor does not take.
    """
    if setup.media is None or setup.media.refusal:
        return None
    try:
        if setup.media.kind == "audio":
            load_packages()
        media = MediaPreprocessors(setup.media, tokenizer)
    except AiakqError as failure:
        if failure.id == "bad_option":
            raise
        loaded.media_failures = dict.fromkeys(setup.media.max_items, Failure.of(failure))
        return None
    for template in templates:
        template.placeholders = media.default.placeholders
    loaded.media_failures = {kind: Failure.of(failure) for kind, failure in media.default.failures.items()}
    return media


def load_audio(setup: Setup, loaded: Loaded) -> Spectrogram | None:
    """Return what makes spectrograms of audio; None for a model that does not transcribe, and if it cannot be loaded:
    requests then fail with ``loaded.audio_failure``.
    """
    if setup.speech is None:
        return None
    try:
        load_packages()
        return Spectrogram(setup.speech)
    except AiakqError as failure:
        loaded.audio_failure = Failure.of(failure)
        return None
