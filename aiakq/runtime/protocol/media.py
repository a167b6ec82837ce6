"""Media of a prompt: images, videos or audios, whose embeddings take the place of those of some of its tokens, or the
audio that all of its tokens read.

A ``MediaItem`` is made where the prompt is tokenized; the engine schedules by its key and places, and only an executor
reads its tensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from aiakq.errors import error

MediaKind = Literal["image", "video", "audio"]
#: What several items of a kind are called.
PLURALS: Mapping[MediaKind, str] = {"image": "images", "video": "videos", "audio": "audios"}
#: Default of --limit-mm-per-prompt, as in vLLM.
MAX_ITEMS = 999

#: Architectures whose videos are computed: frames are images in rows and columns, each with a position in time.
_WITH_VIDEOS = (
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)
#: Kind of media -> architectures of which it is computed: embeddings replace those of placeholder tokens.
ARCHITECTURES: Mapping[MediaKind, tuple[str, ...]] = {
    "image": (
        "Gemma3ForConditionalGeneration",
        "Idefics3ForConditionalGeneration",
        "InternVLForConditionalGeneration",
        "LlavaForConditionalGeneration",
        "Mistral3ForConditionalGeneration",
        "SmolVLMForConditionalGeneration",
        *_WITH_VIDEOS,
    ),
    "video": _WITH_VIDEOS,
    "audio": ("Qwen2AudioForConditionalGeneration", "VoxtralForConditionalGeneration"),
}


class TensorRecord(msgspec.Struct, frozen=True):
    """A tensor as bytes: contiguous, little-endian; ``dtype`` is a name that torch and NumPy share."""

    dtype: str
    shape: list[int]
    data: bytes


class MediaItem(msgspec.Struct, frozen=True):
    """One image, video or audio of a prompt, preprocessed.

    key      hash of everything that its embeddings depend on; see ``media_key``.
    places   (first token, number of tokens) of the runs of prompt tokens that its embeddings replace, ascending. Tokens
             between them, such as ends of rows, are embedded as text.
    tensors  arguments of the encoder by name.
    grid     rows and columns of the tokens of an image, or of each frame of a video, if their positions depend on them
             (M-RoPE); else None.
    is_whole  whether the tokens of a run attend to each other in both directions, so that a step computes all of them
             that are not cached.
    num_states  states of an encoder that all tokens read by cross-attention; then it has no places.
    times    positions in time of the frames that follow each other in a run, beginning with 0, ascending; empty if a
             run is one frame.
    """

    kind: MediaKind
    key: str
    places: list[tuple[int, int]]
    tensors: dict[str, TensorRecord]
    grid: tuple[int, int] | None = None
    is_whole: bool = False
    num_states: int = 0
    times: list[int] = []

    @property
    def first(self) -> int:
        """Number of the first token that it replaces."""
        return self.places[0][0]

    @property
    def end(self) -> int:
        """Number of the token after the last one that it replaces."""
        first, count = self.places[-1]
        return first + count

    @property
    def num_embeddings(self) -> int:
        """The number of tokens that it replaces, or of states that all tokens read."""
        return self.num_states or sum(count for _, count in self.places)

    @property
    def num_bytes(self) -> int:
        """The bytes of its tensors."""
        return sum(len(tensor.data) for tensor in self.tensors.values())


def whole_runs(media: Iterable[MediaItem], first: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the runs of tokens of ``media`` that attend to each other in both directions and of which some are among
    the tokens ``first`` .. ``end - 1``.
    """
    for item in media:
        for place in item.places if item.is_whole else ():
            if place[0] < end and first < sum(place):
                yield place


def media_key(kind: str, tensors: Mapping[str, TensorRecord]) -> str:
    """Return the key of an item with these tensors: the same for equal ones only."""
    digest = hashlib.blake2b(kind.encode(), digest_size=16, person=b"aiakq media")
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\0{name}\0{tensor.dtype}\0{tensor.shape}\0{len(tensor.data)}\0".encode())
        digest.update(tensor.data)
    return digest.hexdigest()


class MediaSettings(msgspec.Struct, frozen=True):
    """How the media of one request are read, where that differs from what the arguments of the engine say.

    processor_kwargs  arguments of the processors of images and videos (mm_processor_kwargs).
    io_kwargs         how files of videos are read (media_io_kwargs).
    """

    processor_kwargs: dict[str, object] = {}
    io_kwargs: dict[str, object] = {}

    def __bool__(self) -> bool:
        return bool(self.processor_kwargs or self.io_kwargs)


#: As the arguments of the engine say.
AS_CONFIGURED = MediaSettings()


class MediaLimits(msgspec.Struct, frozen=True):
    """What a model accepts besides text.

    refusal         why it takes no media; "" if it does.
    max_items       kind of media that its encoder could read -> items per prompt.
    max_embeddings  tokens that all items of a prompt take together: the encoder cache holds them.
    refusals        kind -> why its items are refused, if it is another reason or those of another kind are read.
    """

    refusal: str = ""
    max_items: dict[MediaKind, int] = {}
    max_embeddings: int = 0
    refusals: dict[MediaKind, str] = {}

    @property
    def kinds(self) -> list[MediaKind]:
        """The kinds that are read."""
        return [kind for kind in self.max_items if not self.refusal_of(kind)]

    def refusal_of(self, kind: MediaKind) -> str:
        """Return why items of a kind are refused; "" if they are read."""
        if kind in self.max_items:
            return self.refusals.get(kind) or self.refusal
        if not self.kinds:
            return "only text is read"
        return f"the model reads {listed_words(['text', *(PLURALS[each] for each in self.kinds)])} only"

    def check_settings(self, settings: MediaSettings) -> None:
        """Raise ``unsupported_parameter`` for settings of media that the model does not read."""
        given: Mapping[str, tuple[object, MediaKind]] = {
            "mm_processor_kwargs": (settings.processor_kwargs, "image"),
            "media_io_kwargs": (settings.io_kwargs, "video"),
        }
        for param, (value, kind) in given.items():
            if value and (refusal := self.refusal_of(kind)):
                raise error("unsupported_parameter", param=param, reason=refusal)

    def check_counts(self, items: Iterable[tuple[MediaKind, str]]) -> None:
        """Raise ``unsupported_parameter`` for an item of a kind that is not read, and ``media_refused`` for too many.

        items  of a prompt: the kind of each, and its name in errors.
        """
        params: dict[MediaKind, list[str]] = {}
        for kind, param in items:
            params.setdefault(kind, []).append(param)
        for kind, listed in params.items():
            if refusal := self.refusal_of(kind):
                raise error("unsupported_parameter", param=listed[-1], reason=refusal)
            if len(listed) > self.max_items[kind]:
                allowed = f"--limit-mm-per-prompt allows {self.max_items[kind]} in a prompt"
                reason = f"the number of {PLURALS[kind]} is {len(listed)}, and {allowed}"
                raise error("media_refused", param=listed[-1], reason=reason)

    def check(self, items: Iterable[MediaItem], num_tokens: int) -> None:
        """Raise as ``check_counts``, and ``media_refused`` for places outside of a prompt of ``num_tokens``, and for
        positions of a video behind its end.
        """
        listed, end = list(items), 0
        self.check_counts((item.kind, "prompt") for item in listed)
        for item in listed:
            for first, count in item.places:
                if not (count > 0 and end <= first and first + count <= num_tokens):
                    reason = f"the places of one of its {PLURALS[item.kind]} are not in the prompt"
                    raise error("media_refused", param="prompt", reason=reason)
                if item.times and item.times[-1] >= count:  # tables of positions are as long as the longest prompt
                    reason = (
                        f"the frames of a video are {item.times[-1]} positions apart in its {count} tokens, which have "
                        "as many positions; send more frames in a second, or larger ones"
                    )
                    raise error("media_refused", param="prompt", reason=reason)
                end = first + count
        total = sum(item.num_embeddings for item in listed)
        if total > self.max_embeddings:
            taken = f"its {named_kinds(item.kind for item in listed)} take {total} tokens"
            reason = f"{taken}, more than the {self.max_embeddings} of the encoder cache"
            raise error("media_refused", param="prompt", reason=reason)


def named_kinds(kinds: Iterable[MediaKind]) -> str:
    """Return what items of ``kinds`` are called together, such as "images and videos"."""
    return listed_words([PLURALS[kind] for kind in dict.fromkeys(kinds)])


def listed_words(words: Sequence[str]) -> str:
    """Return words as a sentence lists them: "a", "a and b", "a, b and c"."""
    *others, last = words or [""]
    return f"{', '.join(others)} and {last}" if others else last
