"""Load a model to serve: start the engine process and load the tokenizer in parallel."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence

from aiakq.arguments.server import ServerArguments
from aiakq.server.api.message_format import ParserOptions, read_chat_template, template_defaults
from aiakq.server.api.model_info import ModelInfo
from aiakq.server.api.renderer import Renderer
from aiakq.server.api.service import ServerState, Service
from aiakq.server.api.service_options import MIN_BODY_BYTES, ServiceOptions
from aiakq.server.process.ipc import Configured, Ready
from aiakq.server.process.managers import requests_of
from aiakq.server.process.queue_limits import QueueLimits
from aiakq.server.process.replicas import Supervisors
from aiakq.server.process.text_client import TextClient
from aiakq.server.telemetry.events import OnEvent, ServerEvent, phase_event
from aiakq.server.telemetry.metrics import Metrics
from aiakq.server.telemetry.observers import open_observers
from aiakq.server.telemetry.process_metrics import add_process_metrics


async def load_service(
    supervisors: Supervisors, args: ServerArguments, on_event: OnEvent
) -> tuple[Service, list[Ready]]:
    """Wait until the engines are ready. Returns the service and the ``Ready`` record of every engine."""
    parsers = ParserOptions(args)
    options, observers = ServiceOptions.from_args(args), open_observers(args, on_event)
    reports, configured, text = await _load_engines_and_tokenizer(supervisors, args, on_event, parsers)
    ready = reports[0]
    metrics = Metrics(args.served_names[0], ready.limits.max_model_len, ready.settings)
    add_process_metrics(
        metrics.registry,
        lambda: [supervisor.engine.pid for supervisor in supervisors.all],
        device=ready.facts.get("device", "").partition(",")[0],
        quantization=ready.facts.get("model", "").rpartition(", ")[2],
        dtype=configured.dtype,
    )
    queue = QueueLimits(
        max_running=ready.max_num_seqs,
        max_waiting=args.max_num_queued_reqs,
        max_waiting_tokens=args.max_num_queued_tokens or 4 * ready.limits.max_kv_tokens,
        max_wait_seconds=args.max_queue_seconds,
        max_request_seconds=args.max_request_seconds,
    )
    model = ModelInfo.from_args(args, configured.dtype, ready.limits, configured.sampling)
    renderer = Renderer(
        text,
        ready.limits,
        parsers.message_format(text.loaded.tools_template, text.loaded.facts.takes_tools),
        options,
        metrics.ignored_fields.inc,
    )
    manager = requests_of(reports, text.tokenizer, text.loaded.vocabulary, metrics, queue)
    manager.use_adapters(model.adapters)
    state = ServerState(manager, text, metrics, lambda: supervisors.progress.as_dict(), observers)
    text.on_loss = metrics.tokenizer_restarts.inc
    text.check_ends(ready.limits.eos_token_ids)
    for warning in _warnings(text, model):
        on_event(ServerEvent("warning", warning))
    return Service(model, renderer, state, options), reports


def _warnings(text: TextClient, model: ModelInfo) -> Iterator[str]:
    """Yield what operators should know about the model's files. Raises ``template_loses_users``."""
    if warning := _vocabulary_warning(text, model.limits.vocab_size):
        yield warning
    if not model.limits.generates or model.limits.speech is not None:
        return
    if text.tokenizer.has_text and not text.has_template:
        yield "The model has no chat template: chat requests are refused. --chat-template FILE gives it one."
    yield from _template_warnings(text)
    if failure := text.loaded.grammar_failure or text.end_failure:
        yield f"Structured output is refused: {failure}."


def _vocabulary_warning(text: TextClient, vocab_size: int) -> str:
    """Return a warning if the tokenizer has tokens beyond the model's vocabulary, else ""."""
    size = text.tokenizer.vocab_size if text.tokenizer.has_text else 0
    if size <= vocab_size:
        return ""
    shown = ", ".join(f"{token!r}" for token in text.tokenizer.raw_tokens(range(vocab_size, min(size, vocab_size + 4))))
    where = f"The tokenizer has {size} tokens, but the model's vocabulary {vocab_size}"
    return f"{where}: texts with {shown}{', ...' if size > vocab_size + 4 else ''} are refused."


def _template_warnings(text: TextClient) -> Iterator[str]:
    """Yield what operators should know about the chat template. Raises ``template_loses_users``."""
    loaded = text.loaded
    failures = [loaded.template_failure(with_tools) for with_tools in (False, True)]
    for number, failure in enumerate(failures):
        if failure is None:
            continue
        if failure.id == "template_loses_users":
            raise failure
        other = failures[1 - number]
        if other is None or other.message != failure.message:
            kind = f"Chat requests {'with' if number else 'without'} tools"
        elif number:
            continue
        else:
            kind = "Chat requests"
        yield f"{failure.message} {kind} are refused. --chat-template FILE gives another one."
    if loaded.unused_template:
        yield f"{loaded.unused_template} --chat-template FILE gives the model another one."
    facts = text.loaded.facts
    if facts.forms.get("assistant") == []:
        yield "The chat template leaves out messages of the assistant: conversations with them are refused."
    if not facts.shows_turns:
        yield "The chat template does not show all turns of a conversation: those of more than one are refused."
    if facts.refusal:
        yield f"The chat template refuses every conversation of users and assistants: {facts.refusal}."
    for what, reason in facts.failures.items():
        kind = "tools" if what == "tools" else f"messages of the role {what}"
        yield f"The chat template fails for conversations with {kind}: {reason}."


async def _load_engines_and_tokenizer(
    supervisors: Supervisors, args: ServerArguments, on_event: OnEvent, parsers: ParserOptions
) -> tuple[list[Ready], Configured, TextClient]:
    """Load the tokenizer in its own process while the engines load weights. Raises the first failure of any."""
    chat_template = read_chat_template(args.chat_template)
    configured: asyncio.Future[Configured] = asyncio.get_running_loop().create_future()

    runs_code = args.trust_remote_code or args.tokenizer_extension_path is not None
    text = TextClient(
        chat_template,
        4 * (args.max_body_bytes or MIN_BODY_BYTES),
        with_torch=runs_code,
        content_format=args.chat_template_content_format,
        template_source=_template_source(args.chat_template),
        template_arguments=template_defaults(args.default_chat_template_kwargs),
    )

    async def load_tokenizer() -> None:
        if not args.skip_tokenizer_init:
            await text.spawn()
        known = await configured
        start_time = time.monotonic()
        await text.load(known.tokenizer, known.media, known.speech)
        facts = text.loaded.facts
        parsers.message_format(
            text.loaded.tools_template, facts.takes_tools
        )  # rejected before the engines have read gigabytes
        on_event(phase_event("tokenizer", time.monotonic() - start_time, text.describe()))

    engine_task = asyncio.create_task(supervisors.load(configured.set_result))
    tokenizer_task = asyncio.create_task(load_tokenizer())
    tasks: tuple[asyncio.Task[object], ...] = (engine_task, tokenizer_task)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done():
                task.result()
        return engine_task.result(), configured.result(), text
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await text.stop()
        raise


def _template_source(value: str | None) -> str:
    """Return how errors refer to the template of --chat-template."""
    return f"'{value}' of --chat-template" if value is not None and "{" not in value else "of --chat-template"


def startup_facts(service: Service, reports: Sequence[Ready]) -> dict[str, str]:
    """Return the facts for the start-up table, which are shown below its phases."""
    sampling, facts = service.model.default_sampling, dict(reports[0].facts)
    if len(reports) > 1:
        facts["replicas"] = f"{len(reports)} engines like this one"
    if not sampling:
        return facts
    return {**facts, "default sampling": ", ".join(f"{name} {value}" for name, value in sampling.items())}
