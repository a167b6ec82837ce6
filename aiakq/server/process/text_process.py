"""Worker processes that render chat templates and run the tokenizer, both untrusted, under time and memory limits.

transformers runs templates in a sandbox without access to files, but a template can still loop forever or exhaust
memory, and so can the regular expressions and normalizers of a tokenizer, on texts that clients choose. So this process
loads the tokenizer once and forks a worker per socket. A worker sets a timer before each request; when it expires, the
kernel kills the worker, whatever it is doing, and a new one, forked in a millisecond, replaces it.

``text_client`` starts it with the numbers of inherited sockets as arguments: the control socket, then one per worker.
Before them, ``--without-torch`` keeps transformers from importing torch, which takes seconds and 200 MB, and which only
tokenizers with code of their own may need.
The first record on the control socket is a ``Setup``, to which the process replies with ``Loaded``; the others are
``Drop``. Requests and replies are numbered. The number of a worker's current request is also in shared memory, so that
the parent can reply for a worker that dies.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable
from typing import Literal

import msgspec

from aiakq.errors import AiakqError, error, first_line
from aiakq.runtime.multimodal.audio_files import decode_audio
from aiakq.runtime.multimodal.loading import MediaInput, MediaPreprocessors
from aiakq.runtime.multimodal.spectrogram import RATE, Spectrogram
from aiakq.runtime.structured.compiled import MAX_GRAMMAR_HELD
from aiakq.runtime.structured.compiler import GrammarCompiler
from aiakq.runtime.structured.relaxed_schemas import relaxed_schema
from aiakq.runtime.text.cut_text import cut_text
from aiakq.runtime.text.tokenizer import Tokenizer
from aiakq.runtime.text.whole_texts import encode_whole
from aiakq.server.process.text_loading import (
    MAX_TEMPLATE_BYTES,
    Templates,
    load_audio,
    load_media,
    load_tokenizer,
    new_compiler,
)
from aiakq.server.process.text_messages import (
    MAX_SECONDS,
    MAX_SECONDS_PER_CHAR,
    WITHOUT_TORCH,
    Drop,
    Part,
    ProcessControl,
    Setup,
    Spectrum,
    TextReply,
    TextRequest,
    ToTextProcess,
    WorkerSocket,
    pair_length,
    size_of,
)
from aiakq.system.channel import Disconnected, Failure, framed
from aiakq.system.child import begin_child, end_with_parent, parent_socket, without_stderr
from aiakq.system.memory import heap_bytes, limit_more_memory, trim_heap

#: Approximate size of request and reply in bytes above which a worker returns freed memory to the system.
_TRIM_ABOVE_BYTES = 1 << 20
#: Number of a worker's current request, and index of its stage in _PARTS.
_CURRENT = struct.Struct("=QQ")
#: Bytes a worker may allocate in addition to its initial size: for a grammar, and anything else but a template.
MAX_GRAMMAR_BYTES, MAX_BYTES = 512 << 20, 1 << 30

_PARTS: tuple[Part, ...] = ("template", "tokenizer", "grammar", "media", "audio")


def main() -> None:
    """Entry point of the process: fork a worker per socket, and replace workers that die."""
    begin_child()
    if sys.argv[1] == WITHOUT_TORCH:
        del sys.argv[1]
        sys.modules["torch"] = None  # type: ignore[assignment]  # to transformers, torch is not installed then
    first, *sockets = map(parent_socket, range(len(sys.argv) - 1))
    control = ProcessControl(first, ToTextProcess)
    from transformers import AutoTokenizer  # noqa: F401  takes seconds, during which the server determines what to load

    setup = control.receive()
    if not isinstance(setup, Setup):  # the server has already exited
        return
    try:
        tokenizer, templates, loaded = load_tokenizer(setup)
        media = load_media(setup, tokenizer, templates.all, loaded)
        spectrogram = load_audio(setup, loaded)
    except AiakqError as failure:
        control.send_failure(failure)
        return
    worker = _Worker(tokenizer, templates, setup.max_chars, new_compiler(tokenizer, loaded), media, spectrogram)
    pool = _WorkerPool(control, [WorkerSocket(sock, TextRequest) for sock in sockets], worker)
    control.send(loaded)
    pool.run()
    os._exit(0)


class _WorkerPool:
    """The workers by process id, and the current request of each, in memory shared with them."""

    def __init__(self, control: ProcessControl, channels: list[WorkerSocket], worker: _Worker) -> None:
        self._control = control
        self._channels = channels
        self._worker = worker
        self._current = mmap.mmap(-1, _CURRENT.size * len(channels))
        self._wake, self._wake_end = os.pipe()
        for descriptor in (self._wake, self._wake_end):
            os.set_blocking(descriptor, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._wake_end)
        self._slots = {self._fork(slot): slot for slot in range(len(channels))}

    def run(self) -> None:
        """Replace workers that die or are stopped, until the server exits."""
        poll = select.poll()
        poll.register(self._control.socket, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while self._slots:
            ready = dict(poll.poll())
            if self._wake in ready:
                os.read(self._wake, 1 << 12)
                while self._slots:
                    pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
                    if pid == 0:
                        break
                    if os.WIFSTOPPED(status):  # by an operator, perhaps for good
                        os.kill(pid, signal.SIGKILL)
                        pid, status = os.waitpid(pid, 0)
                    self._on_exit(pid, status)
            if self._control.socket.fileno() in ready:
                drop = self._control.receive()
                if not isinstance(drop, Drop):
                    break
                self._drop(drop)
        for pid in self._slots:
            os.kill(pid, signal.SIGKILL)

    def _drop(self, drop: Drop) -> None:
        """Kill the worker if it is still working on the request; SIGSTOP first, so that it cannot proceed meanwhile."""
        pid = next((pid for pid, slot in self._slots.items() if slot == drop.slot), None)
        if pid is not None and drop.is_late:
            os.kill(pid, signal.SIGKILL)
            self._on_exit(*os.waitpid(pid, 0))
            return
        if pid is None or self._number(drop.slot) != drop.number:
            return
        os.kill(pid, signal.SIGSTOP)
        _, status = os.waitpid(pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            self._on_exit(pid, status)
        elif self._number(drop.slot) == drop.number:
            os.kill(pid, signal.SIGKILL)
            self._on_exit(*os.waitpid(pid, 0))
        else:
            os.kill(pid, signal.SIGCONT)

    def _on_exit(self, pid: int, status: int) -> None:
        """Reply for a worker that died, and replace it. A worker that exited by itself has lost the server."""
        slot = self._slots.pop(pid)
        if not os.WIFSIGNALED(status) and not os.WEXITSTATUS(status):
            return
        number, at = _CURRENT.unpack_from(self._current, slot * _CURRENT.size)
        failed = _PARTS[at]
        killer = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        timed_out = killer == signal.SIGPROF
        reason = "it ended the process that worked on it, probably because it is too large"
        if timed_out:
            is_variable = failed in ("tokenizer", "media", "audio")
            reason = "it took too long" if is_variable else f"it took longer than {MAX_SECONDS:g} s"
        try:
            if number:
                seconds = MAX_SECONDS if timed_out else 0.0
                # Nothing in a request sends these signals: the system was short of memory, or an operator did.
                is_lost = killer in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
                reply = TextReply(number, failure=reason, failed=failed, seconds=seconds, is_lost=is_lost)
                self._channels[slot].send(reply)
        except OSError:  # the server is gone
            return
        self._slots[self._fork(slot)] = slot

    def _number(self, slot: int) -> int:
        number: int
        number, _ = _CURRENT.unpack_from(self._current, slot * _CURRENT.size)
        return number

    def _fork(self, slot: int) -> int:
        _CURRENT.pack_into(self._current, slot * _CURRENT.size, 0, 0)
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            end_with_parent()
            self._control.close()
            offset = slot * _CURRENT.size
            code = self._worker.run(
                self._channels[slot],
                lambda number, part: _CURRENT.pack_into(self._current, offset, number, _PARTS.index(part)),
            )
        except Disconnected:  # the server is gone
            code = 0
        except BaseException:  # a bug, of which nothing else would tell
            traceback.print_exc()
        finally:
            os._exit(code)


class _Worker:
    """A worker's loop. ``set_current`` publishes the current request (0 if idle) and its stage."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        templates: Templates,
        max_chars: int,
        compiler: GrammarCompiler | None,
        media: MediaPreprocessors | None,
        spectrogram: Spectrogram | None,
    ) -> None:
        self._tokenizer = tokenizer
        self._templates = templates
        self._max_chars = max_chars
        self._compiler = compiler
        self._media = media
        self._spectrogram = spectrogram

    def run(self, channel: WorkerSocket, set_current: Callable[[int, Part], None]) -> int:
        """Work until the other end is gone."""
        # CPU time, not wall-clock time: the machine may be busy, and neither stage can sleep.
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        while (request := channel.receive()) is not None:
            part: Part = "tokenizer"

            def begin(next_part: Part, seconds: float, num_bytes: int, number: int = request.number) -> None:
                nonlocal part
                part = next_part
                set_current(number, part)
                _set_limits(seconds, num_bytes)

            try:
                frame = framed(self._answer(request, begin))
            except MemoryError:
                frame = framed(TextReply(request.number, failure="it takes too much memory", failed=part))
            except AiakqError as exception:
                frame = framed(TextReply(request.number, error=Failure.of(exception)))
            except BaseException as exception:  # templates can raise anything, and tokenizers in Rust can panic
                frame = framed(TextReply(request.number, failure=first_line(exception)[:200], failed=part))
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
            # From here on the request cannot be dropped, so that no partial frame is sent.
            set_current(0, "template")
            channel.send_bytes(frame)
            if size_of(request) + len(frame) > _TRIM_ABOVE_BYTES:
                # A collection of reference cycles would write to memory that all workers share.
                del request, frame
                trim_heap()
        return 0

    def _answer(self, request: TextRequest, begin: Callable[[Part, float, int], None]) -> TextReply:
        """Process ``request``. ``begin`` limits the CPU time and memory of the stage that follows."""
        if request.grammar is not None:
            begin("grammar", MAX_SECONDS, MAX_GRAMMAR_BYTES)
            began = time.process_time()
            reply = self._compile(request)
            reply.seconds = time.process_time() - began
            return reply
        if request.messages is not None and self._tokenizer.encodes_chats:
            begin("template", MAX_SECONDS + MAX_SECONDS_PER_CHAR * size_of(request), MAX_TEMPLATE_BYTES)
            ids = self._tokenizer.chat_ids(request.messages, request.arguments)
            request.texts = [self._tokenizer.decode(ids, skip_special_tokens=False)]
            return self._with_media(request, ids, begin) if request.media else self._process(request, [ids])
        if request.messages is not None:
            begin("template", MAX_SECONDS, MAX_TEMPLATE_BYTES)
            request.texts = [self._render(request)]
        size = sum(map(len, request.texts)) + sum(map(pair_length, request.pairs)) + len(request.token_ids or ())
        begin("tokenizer", MAX_SECONDS + MAX_SECONDS_PER_CHAR * size, MAX_BYTES)
        if request.media:
            [ids] = [self._tokenizer.encode(text, request.add_special_tokens) for text in request.texts]
            return self._with_media(request, ids, begin)
        reply = self._process(request)
        if request.audio is not None:
            begin("audio", request.media_seconds, request.media_bytes)
            reply.spectrum = self._spectrum(request.audio)
        return reply

    def _spectrum(self, audio: bytes) -> Spectrum:
        assert self._spectrogram is not None, "the server knows that there is none"
        with without_stderr():  # decoders write there what they think of a client's file
            samples = decode_audio(audio, "file")
        values = self._spectrogram.of(samples)
        content = self._spectrogram.content(samples)
        return Spectrum(values.tobytes(), len(values), content, len(samples) / RATE)

    def _with_media(self, request: TextRequest, ids: list[int], begin: Callable[[Part, float, int], None]) -> TextReply:
        """Return the reply for a conversation with media, whose placeholders have the tokens ``ids``."""
        if self._media is None:
            raise error("media_refused", param="messages", reason="the tokenizer's process reads no media")
        begin("media", request.media_seconds, request.media_bytes)
        given = [MediaInput(each.kind, each.value, each.param) for each in request.media]
        with without_stderr():  # see above
            expanded, media = self._media.of(request.media_settings).expanded(ids, given, "messages")
        reply = self._process(request, [expanded])
        reply.media = list(media)
        return reply

    def _compile(self, request: TextRequest) -> TextReply:
        """Compile a grammar and reply whether it can be enforced, or make a schema enforceable."""
        compiler, grammar, reply = self._compiler, request.grammar, TextReply(request.number)
        assert compiler is not None and grammar is not None, "the server knows that there is none"
        if request.relaxed_schema:

            def compiles(schema: object) -> bool:
                return not compiler.try_compile(msgspec.structs.replace(grammar, text=json.dumps(schema)))[0]

            schema, reply.dropped = relaxed_schema(json.loads(request.relaxed_schema), compiles)
            reply.text = json.dumps(schema, ensure_ascii=False)
            return reply
        before = heap_bytes()
        reply.failure, prototype = compiler.try_compile(grammar)
        reply.num_bytes = max(0, heap_bytes() - before)
        if not reply.failure and reply.num_bytes > MAX_GRAMMAR_HELD:
            reply.failure = f"it is too large: compiled, it takes {reply.num_bytes >> 20} MiB of at most "
            reply.failure += f"{MAX_GRAMMAR_HELD >> 20}"
        if reply.failure:
            reply.failed = "grammar"
        return reply

    def _render(self, request: TextRequest) -> str:
        template = self._templates.with_tools if "tools" in request.arguments else self._templates.plain
        assert template is not None, "the server knows that there is none"
        text = template.render(request.messages or [], request.call_syntax, **request.arguments)
        if len(text) > self._max_chars:
            raise ValueError(f"its text is longer than {self._max_chars} characters")
        return text

    def _process(self, request: TextRequest, ids: list[list[int]] | None = None) -> TextReply:
        """Tokenize or detokenize; ``ids``: those of the texts, if they are known."""
        tokenizer, reply = self._tokenizer, TextReply(request.number)
        if request.token_ids is not None:
            reply.text = tokenizer.decode(request.token_ids, request.skip_special_tokens)
            return reply
        if request.cut_to is not None:
            reply.texts = [cut_text(tokenizer, text, request.cut_to) for text in request.texts]
            return reply
        if request.messages is not None:
            reply.text = request.texts[0]
        lengths = map(pair_length, request.pairs) if request.pairs else map(len, request.texts)
        reply.num_chars = max(lengths, default=0)
        if request.max_chars is not None and reply.num_chars > request.max_chars:
            return reply
        if request.is_whole:
            ids, reply.second_texts = _encoded_whole(tokenizer, request)
        else:
            if ids is None:
                ids = [tokenizer.encode(text, request.add_special_tokens) for text in request.texts]
            ids += [tokenizer.encode_pair(*pair) for pair in request.pairs]
        reply.counts = [len(each) for each in ids]
        if request.as_json:
            tokens = [_with_piece(id, tokenizer) for id in ids[0]] if request.with_pieces else ids[0]
            reply.ids_json = json.dumps(tokens, separators=(",", ":")).encode()
            if request.with_token_texts:
                reply.token_texts_json = msgspec.json.encode(tokenizer.raw_tokens(ids[0]))
        else:
            reply.token_ids = [request.limited(each) for each in ids]
        return reply


def _encoded_whole(tokenizer: Tokenizer, request: TextRequest) -> tuple[list[list[int]], list[int]]:
    """Return the ids of the texts and pairs, and the index of each second text."""
    side: Literal["left", "right"] = "right" if request.from_start else "left"
    inputs: list[tuple[str, ...]] = [*((text,) for text in request.texts), *request.pairs]
    special = request.add_special_tokens
    found = [encode_whole(tokenizer, texts, request.cut_to_fit, side, special) for texts in inputs]
    return [ids for ids, _ in found], [second for _, second in found]


def _with_piece(id: int, tokenizer: Tokenizer) -> dict[str, object]:
    """Return a token with its text, or with its bytes if they are not Unicode."""
    text = tokenizer.token_bytes(id)
    try:
        return {"id": id, "piece": text.decode()}
    except UnicodeDecodeError:
        return {"id": id, "piece": list(text)}


def _set_limits(seconds: float, num_bytes: int) -> None:
    """Limit the CPU time from now on, and the memory allocated in addition to the current size."""
    limit_more_memory(num_bytes)
    signal.setitimer(signal.ITIMER_PROF, seconds)
