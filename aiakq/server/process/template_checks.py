"""Check a chat template in a process of its own, because it is untrusted: it could loop forever or exhaust memory."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Mapping

import msgspec

from aiakq.errors import AiakqError
from aiakq.runtime.text.chat_template import ChatTemplate, check_compiles
from aiakq.runtime.text.template_facts import FORMS, TemplateFacts
from aiakq.system.channel import Failure

#: Seconds of CPU time for all probes. A template that needs more is used without knowing what it does.
MAX_SECONDS = 20


#: Seconds and bytes up to which compiling a template is cheap. Jinja computes constant expressions when it compiles.
_CHEAP_SECONDS, _CHEAP_BYTES = 1.0, 64 << 20


class _Result(msgspec.Struct):
    """What the process found: facts, or an error of the registry, and whether compiling is cheap."""

    facts: TemplateFacts | None = None
    failure: Failure | None = None
    is_cheap: bool = False


def checked_template(
    text: str,
    special_tokens: Mapping[str, object],
    content_format: str,
    source: str,
    limit_memory: Callable[[], None],
    with_tools: bool = False,
    arguments: Mapping[str, object] = {},
) -> ChatTemplate:
    """Return ``text`` as a template, compiled for all processes forked later if that is cheap.

    Raises ``template_unusable`` and ``template_loses_users``.

    limit_memory  called in the process that runs the template.
    """
    from transformers.utils import chat_template_utils  # noqa: F401  imported once, for all processes

    def check() -> _Result:
        return _check(text, special_tokens, content_format, source, with_tools, arguments)

    result = _in_child(check, limit_memory)
    if result.failure is not None:
        raise result.failure.error()
    facts = result.facts
    if result.is_cheap:
        check_compiles(text, source)
    if facts is None and content_format != "auto":
        forms = [form for form in FORMS if form == content_format]
        facts = TemplateFacts(dict.fromkeys(("user", "assistant", "system", "tool"), forms))
    return ChatTemplate(text, special_tokens, facts or TemplateFacts())


def _check(
    text: str,
    special_tokens: Mapping[str, object],
    content_format: str,
    source: str,
    with_tools: bool,
    arguments: Mapping[str, object],
) -> _Result:
    try:
        before = resource.getrusage(resource.RUSAGE_SELF)
        check_compiles(text, source)
        after = resource.getrusage(resource.RUSAGE_SELF)
        is_cheap = after.ru_utime - before.ru_utime < _CHEAP_SECONDS
        is_cheap = is_cheap and (after.ru_maxrss - before.ru_maxrss) << 10 < _CHEAP_BYTES
        template = ChatTemplate.checked(text, special_tokens, content_format, source, with_tools, arguments)
        return _Result(template.facts, is_cheap=is_cheap)
    except AiakqError as failure:
        return _Result(failure=Failure.of(failure))


def _in_child(function: Callable[[], _Result], limit_memory: Callable[[], None]) -> _Result:
    """Return the result of ``function`` in a forked process, or an empty one if the process did not end by itself."""
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(readable)
            signal.signal(signal.SIGPROF, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            limit_memory()
            with os.fdopen(writable, "wb") as stream:
                stream.write(msgspec.msgpack.encode(function()))
        finally:
            os._exit(0)
    os.close(writable)
    with os.fdopen(readable, "rb") as stream:
        answer = stream.read()
    os.waitpid(pid, 0)
    return msgspec.msgpack.decode(answer, type=_Result) if answer else _Result()
