"""Commands to the engine and to executors, besides requests and steps."""

from __future__ import annotations

from typing import Any

import msgspec

from aiakq.runtime.protocol.adapters import AdapterRef
from aiakq.runtime.protocol.grammar import Grammar
from aiakq.runtime.protocol.request import RequestSpec
from aiakq.runtime.protocol.vocabulary import Vocabulary


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Abort requests and free their pages; unknown and finished ids are ignored."""

    request_ids: list[str]


class ResetPrefixCache(msgspec.Struct, frozen=True, tag="reset_prefix_cache"):
    """Clear the prefix cache: later requests reuse no pages filled before."""


class EnableDrafts(msgspec.Struct, frozen=True, tag="enable_drafts"):
    """Propose draft tokens from now on, or propose none, to measure what they bring. Proposers start anew, and know no
    outputs of earlier requests.
    """

    enabled: bool


class PluginCommand(msgspec.Struct, frozen=True, tag="plugin"):
    """A command to a ``Resource`` of a package outside the tree.

    feature  its name, by which the resource knows the command.
    values   JSON values.
    """

    feature: str
    values: dict[str, Any] = {}


class UnloadAdapter(msgspec.Struct, frozen=True, tag="unload_adapter"):
    """Unload the adapter with this key as soon as no request uses it."""

    key: str


class AdapterStaged(msgspec.Struct, frozen=True, tag="adapter_staged"):
    """The executor has read the adapter with this key, or has failed to: a step can load it without reading files."""

    key: str


class UseVocabulary(msgspec.Struct, frozen=True, tag="use_vocabulary"):
    """The vocabulary for grammars. It precedes the first sequence with a grammar."""

    vocabulary: Vocabulary


class ResetSequences(msgspec.Struct, frozen=True, tag="reset_sequences"):
    """Drop every pending step and every sequence."""


class LoadAdapter(msgspec.Struct, frozen=True, tag="load_adapter"):
    """Put an adapter that was read into a slot.

    error  why rank 0 could not; the others do not try then.
    """

    slot: int
    adapter: AdapterRef
    error: str | None = None

    def __str__(self) -> str:
        return f"adapter {self.adapter.name}: {self.error}"


class FreeAdapter(msgspec.Struct, frozen=True, tag="free_adapter"):
    """Remove the adapter in a slot from memory."""

    slot: int


class DropAdapter(msgspec.Struct, frozen=True, tag="drop_adapter"):
    """Drop what was read of an adapter; no batch loads it."""

    adapter: AdapterRef


class DropMedia(msgspec.Struct, frozen=True, tag="drop_media"):
    """Remove the embeddings of these items from the encoder cache."""

    keys: list[str]


class PrepareGrammar(msgspec.Struct, frozen=True, tag="prepare_grammar"):
    """Begin to compile a grammar while steps run. While the future exists, the compiled grammar stays in memory; if it
    is cancelled, no request waits for the grammar any more.
    """

    grammar: Grammar


class PrepareAdapter(msgspec.Struct, frozen=True, tag="prepare_adapter"):
    """Start reading an adapter while steps run. The result of the future is the error if that failed."""

    adapter: AdapterRef


#: What ``Engine.step`` does besides running requests.
Command = Abort | ResetPrefixCache | EnableDrafts | UnloadAdapter | AdapterStaged | PluginCommand
#: New requests, and commands, in order.
Inbox = list[RequestSpec | Command]
#: What an executor does before it runs the chunks of a batch.
ExecutorCommand = UseVocabulary | ResetSequences | EnableDrafts | DropAdapter | FreeAdapter | LoadAdapter | DropMedia
#: What an executor does while steps run.
Preparation = PrepareGrammar | PrepareAdapter
