"""What the server and the tokenizer's process exchange, over channels (system/channel.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from aiakq.errors import AiakqError
from aiakq.runtime.config.multimodal import MultimodalConfig
from aiakq.runtime.config.speech import SpeechConfig
from aiakq.runtime.protocol.grammar import Grammar
from aiakq.runtime.protocol.media import MediaItem, MediaKind, MediaSettings
from aiakq.runtime.text.infill import Infill
from aiakq.runtime.text.template_facts import TemplateFacts
from aiakq.runtime.text.tokenizer_source import TokenizerSource
from aiakq.runtime.text.tools_in_text import CallSyntax
from aiakq.system.channel import Channel, Failure

WITHOUT_TORCH = "--without-torch"
#: Seconds of CPU time to render a conversation, and to tokenize; the latter grows with the text.
MAX_SECONDS = 1.0
MAX_SECONDS_PER_CHAR = 1e-5
#: The stages of a request.
Part = Literal["template", "tokenizer", "grammar", "media", "audio"]
#: Seconds of CPU time to decode and preprocess an image, a video, or an audio of up to an hour.
MAX_MEDIA_SECONDS: Mapping[MediaKind, float] = {"image": 10.0, "video": 30.0, "audio": 90.0}
#: Bytes that a worker may allocate in addition to its initial size, for all of a request.
MAX_MEDIA_BYTES: Mapping[MediaKind, int] = {"image": 2 << 30, "video": 2 << 30, "audio": 3 << 30}


class Setup(msgspec.Struct, tag="setup"):
    """How texts are tokenized and conversations rendered.

    chat_template    the template that replaces the tokenizer's own.
    max_chars        maximum length of a rendered conversation.
    content_format   one of ``CONTENT_FORMATS``.
    template_source  how errors refer to ``chat_template``.
    template_arguments  variables of the template in every conversation that does not set them.
    template_facts   those of a ``Loaded`` before, with which the templates need not be checked again.
    media            how the model reads images, videos or audio; None if it reads text only.
    speech           how the model transcribes audio; None if it does not.
    """

    source: TokenizerSource
    chat_template: str | None
    max_chars: int
    content_format: str = "auto"
    template_source: str = "of --chat-template"
    template_arguments: dict[str, object] = {}
    template_facts: list[TemplateFacts | None] = []
    media: MultimodalConfig | None = None
    speech: SpeechConfig | None = None


class Loaded(msgspec.Struct, tag="loaded"):
    """The reply to ``Setup``, unless the tokenizer fails to load.

    description        description for the start-up table.
    longest_token      maximum number of characters of a token; 0 if unknown.
    pad_token_id       id of the padding token, or None if there is none.
    pads_left          whether the tokenizer pads before texts.
    decoder            argument of ``TokenDecoder``; empty if the tokenizer is not compiled.
    config             contents of tokenizer_config.json as JSON, see ``Tokenizer.config``.
    has_template       whether there is a chat template.
    tools_template     the template for conversations with tools; if it cannot be used, that without.
    template_failures  why the templates for conversations without and with tools cannot be used.
    template_facts     what these templates do; None for one that cannot be used. Empty if there are none.
    unused_template    see ``Tokenizer``; empty if the operator gives a template.
    vocabulary         encoded ``Vocabulary`` for compiling grammars.
    grammar_failure    why there is no vocabulary.
    infill             tokens for fill-in-the-middle, or None if the model does not support it.
    media_failures     kind of media -> why its items cannot be preprocessed, although the model reads them.
    audio_failure      the same of audio that is transcribed; None if it can be.
    """

    description: str = ""
    longest_token: int = 0
    pad_token_id: int | None = None
    pads_left: bool = False
    decoder: str = ""
    config: bytes = b"{}"
    has_template: bool = False
    tools_template: str = ""
    template_failures: list[Failure | None] = []
    template_facts: list[TemplateFacts | None] = []
    unused_template: str = ""
    vocabulary: bytes = b""
    grammar_failure: str = ""
    infill: Infill | None = None
    media_failures: dict[MediaKind, Failure] = {}
    audio_failure: Failure | None = None

    @property
    def facts(self) -> TemplateFacts:
        """What the template for conversations with tools does; if it cannot be used, that without."""
        return next((facts for facts in reversed(self.template_facts) if facts is not None), TemplateFacts())

    def template_failure(self, with_tools: bool) -> AiakqError | None:
        """Return the error for conversations if their template cannot be used."""
        failure = self.template_failures[with_tools] if self.template_failures else None
        return None if failure is None else failure.error()


class MediaFile(msgspec.Struct):
    """The file of an image, video or audio; ``param`` is its name in errors.

    files  that file; of a video, it may be an image for each frame.
    """

    kind: MediaKind
    files: list[bytes]
    param: str

    @property
    def value(self) -> bytes | list[bytes]:
        """What a ``MediaInput`` has of it."""
        return self.files if self.kind == "video" else self.files[0]

    @property
    def num_bytes(self) -> int:
        """The size of its files."""
        return sum(map(len, self.files))


class Spectrum(msgspec.Struct):
    """The spectrogram of an audio of ``seconds``.

    data     [num_bins, num_frames] float32.
    content  the frames that are not padding.
    """

    data: bytes
    num_bins: int
    content: int
    seconds: float


class TextRequest(msgspec.Struct, tag="request"):
    """One request; numbers start at 1.

    messages, arguments  conversation to render with these template arguments and tokenize, instead of ``texts``.
    call_syntax          how calls are written if the template has no place for tools.
    media                of the conversation, in order of its parts.
    media_settings       how they are read.
    audio                the file of an audio to transcribe, beside ``texts``.
    texts                texts to tokenize.
    pairs                pairs of texts to tokenize instead, each to one list of ids.
    cut_to               number of tokens after which to cut ``texts``, which are returned instead of their ids.
    add_special_tokens   see ``Tokenizer.encode``.
    max_chars            maximum number of characters of a text.
    max_ids              number of token ids to return of each text; None for all.
    from_start           whether they are those at its start, instead of its end.
    is_whole             encode as ``encode_whole`` does, for an encoder.
    cut_to_fit           its limit.
    as_json              return the ids as JSON, because encoding many would block the event loop.
    with_pieces          each of these ids with the text, or the bytes, of its token.
    with_token_texts     also return the spelling of each token in the vocabulary.
    token_ids            ids to decode; all other fields but ``skip_special_tokens`` are then ignored.
    grammar              grammar to compile; all other fields but the next are then ignored.
    relaxed_schema       JSON schema of ``grammar``, as JSON, from which to drop what cannot be enforced.
    """

    number: int
    messages: list[dict[str, Any]] | None = None
    arguments: dict[str, object] = {}
    call_syntax: CallSyntax = CallSyntax()
    media: list[MediaFile] = []
    media_settings: MediaSettings = MediaSettings()
    audio: bytes | None = None
    texts: list[str] = []
    pairs: list[tuple[str, str]] = []
    cut_to: int | None = None
    add_special_tokens: bool = True
    max_chars: int | None = None
    max_ids: int | None = None
    from_start: bool = False
    is_whole: bool = False
    cut_to_fit: int | None = None
    as_json: bool = False
    with_pieces: bool = False
    with_token_texts: bool = False
    token_ids: list[int] | None = None
    skip_special_tokens: bool = False
    grammar: Grammar | None = None
    relaxed_schema: str = ""

    @property
    def _kinds(self) -> list[MediaKind]:
        kinds: list[MediaKind] = [each.kind for each in self.media]
        return kinds if self.audio is None else [*kinds, "audio"]

    @property
    def media_seconds(self) -> float:
        """Seconds of CPU time to decode and preprocess its media and audio."""
        return sum(MAX_MEDIA_SECONDS[kind] for kind in self._kinds)

    @property
    def media_bytes(self) -> int:
        """Bytes that a worker may allocate for its media and audio."""
        return max(MAX_MEDIA_BYTES[kind] for kind in self._kinds)

    def limited(self, ids: list[int]) -> list[int]:
        """Return as many of the ids of a text as are asked for."""
        if self.max_ids is None:
            return ids
        return ids[: self.max_ids] if self.from_start else ids[-self.max_ids :]


class TextReply(msgspec.Struct, tag="reply"):
    """The result, or the ``failure``.

    error      the failure, if it is in the error registry.
    texts      the texts that were cut.
    counts     total number of tokens of each text.
    second_texts  index of the second text in each pair, if ``is_whole``; see ``Prompt``.
    media      of the conversation, preprocessed.
    spectrum   of the audio.
    dropped    what is not enforced of the relaxed schema, which is the ``text``.
    seconds    CPU time of compiling a grammar.
    num_bytes  memory that the compiled grammar takes.
    is_lost    whether the worker was lost for a reason that is not in the request.
    """

    number: int
    text: str = ""
    texts: list[str] = []
    counts: list[int] = []
    token_ids: list[list[int]] = []
    second_texts: list[int] = []
    media: list[MediaItem] = []
    spectrum: Spectrum | None = None
    ids_json: bytes = b""
    token_texts_json: bytes = b""
    num_chars: int = 0
    failure: str = ""
    failed: Part = "tokenizer"
    error: Failure | None = None
    dropped: list[str] = []
    seconds: float = 0.0
    num_bytes: int = 0
    is_lost: bool = False


class Drop(msgspec.Struct, tag="drop"):
    """Drop request ``number``, whose client is gone and on which the worker on socket ``slot`` may be working.

    is_late  replace the worker, which does not reply.
    """

    slot: int
    number: int
    is_late: bool = False


ToTextProcess = Setup | Drop
#: The process's ends of the channels over the control socket and over a worker's socket.
ProcessControl = Channel[Loaded, ToTextProcess]
WorkerSocket = Channel[TextReply, TextRequest]


def pair_length(pair: tuple[str, str]) -> int:
    """Return the total number of characters of both texts."""
    return len(pair[0]) + len(pair[1])


def size_of(request: TextRequest) -> int:
    """Return the approximate number of characters or token ids to process."""
    size = sum(map(len, request.texts)) + sum(map(pair_length, request.pairs)) + len(request.token_ids or ())
    if request.grammar is not None:
        size += len(request.grammar.text) + len(request.relaxed_schema)
    size += sum(each.num_bytes for each in request.media) + len(request.audio or b"")
    for message in request.messages or ():
        content = message.get("content") or ""
        size += 16 + (len(content) if isinstance(content, str) else sum(len(part.get("text", "")) for part in content))
        if len(message) > 2:
            size += len(msgspec.json.encode([message.get("tool_calls"), message.get("reasoning")]))
    if len(request.arguments) > 1:  # beside add_generation_prompt
        size += len(msgspec.json.encode(request.arguments))
    return size
