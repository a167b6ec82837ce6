"""What every route works with: the model's names and limits, the tokenizer, the request manager, the server's state."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiakq
from aiakq.errors import AiakqError, error
from aiakq.runtime.engine.messages import ModelLimits
from aiakq.runtime.sampling_params import SamplingParams
from aiakq.runtime.text.output_processor import truncated
from aiakq.runtime.text.tokenizer import Tokenizer
from aiakq.server.errors import copy_error
from aiakq.server.process.request_manager import RequestManager
from aiakq.server.process.request_stream import Prompt
from aiakq.server.process.template_client import TemplateClient
from aiakq.server.telemetry.logs import request_logger
from aiakq.server.telemetry.metrics import Metrics

#: Threads for tokenization, so that a long prompt does not delay a short one.
TOKENIZER_THREADS = 2
#: Smallest default limit of a request body; models with long contexts have a larger one.
MIN_BODY_BYTES = 4 << 20


@dataclass(frozen=True)
class ModelInfo:
    """The model as clients see it.

    names             what requests may call it; responses use the first.
    path              as given on the command line.
    dtype             of its activations.
    limits            bounds that requests are checked against.
    default_sampling  sampling values of its generation_config.json.
    response_role     the role of chat responses.
    """

    names: tuple[str, ...]
    path: str
    dtype: str
    limits: ModelLimits
    default_sampling: Mapping[str, Any]
    response_role: str

    def check_name(self, name: str | None) -> None:
        """Raise ``unknown_model`` unless ``name`` is served. None means the only model there is."""
        if name is not None and name not in self.names:
            raise error("unknown_model", param="model", name=name[:64], known=", ".join(self.names))


class Service:
    """One served model and the server's state.

    fingerprint     equal for equal models, dtypes and versions.
    progress        how far loading is, for /ready.
    max_body_bytes  limit of a request body.
    log_prompts     characters or token ids of a prompt to log; None: requests are not logged.
    num_in_flight   requests to generate that are not answered yet.
    closing         why no new request is accepted; None until shutdown.
    """

    def __init__(
        self,
        model: ModelInfo,
        tokenizer: Tokenizer,
        manager: RequestManager,
        metrics: Metrics,
        *,
        chat_template: str | None,
        max_body_bytes: int | None,
        progress: Callable[[], dict[str, Any]],
        log_prompts: float | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.manager = manager
        self.metrics = metrics
        self.progress = progress
        self.log_prompts = log_prompts
        self.created = int(time.time())
        self.fingerprint = fingerprint(model.names[0], Path(model.path), model.dtype)
        self.max_body_bytes = max_body_bytes or max(MIN_BODY_BYTES, 8 * model.limits.max_model_len)
        self.num_in_flight = 0
        self.closing: AiakqError | None = None
        self.templates = TemplateClient(tokenizer, chat_template, 4 * self.max_body_bytes)
        self._threads = ThreadPoolExecutor(TOKENIZER_THREADS, "tokenize")

    def check_available(self) -> None:
        """Raise why nothing can be generated now: there is no engine, or the server is shutting down."""
        failure = self.manager.failure or self.closing
        if failure is not None:
            raise copy_error(failure)

    async def tokenize_prompts(self, prompts: Sequence[str | list[int]], add_special_tokens: bool) -> list[Prompt]:
        """Tokenize the prompts that are text."""
        return [
            Prompt(prompt, await self.encode(prompt, add_special_tokens))
            if isinstance(prompt, str)
            else Prompt(None, prompt)
            for prompt in prompts
        ]

    async def tokenize_chat(
        self, messages: list[dict[str, Any]], template_kwargs: Mapping[str, Any], add_special_tokens: bool
    ) -> Prompt:
        """Render a conversation with the chat template and tokenize it. Raises no_chat_template, chat_template."""
        if not self.tokenizer.has_text:
            raise error("no_tokenizer")
        text = await self.templates.render(messages, template_kwargs)
        return Prompt(text, await self.encode(text, add_special_tokens))

    def truncate_prompts(self, prompts: list[Prompt], params: SamplingParams) -> list[Prompt]:
        """Apply ``truncate_prompt_tokens``."""
        if params.truncate_prompt_tokens is None:
            return prompts
        kept = [truncated(prompt.token_ids, params, self.model.limits) for prompt in prompts]
        return [
            prompt if token_ids == prompt.token_ids else Prompt(None, token_ids)
            for prompt, token_ids in zip(prompts, kept, strict=True)
        ]

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of ``text``. Runs in a thread, so that the event loop keeps serving others."""
        return await self._run_in_thread(self.tokenizer.encode, text, add_special_tokens)

    async def decode(self, token_ids: list[int]) -> str:
        """The text of ``token_ids``, special tokens included."""
        if not self.tokenizer.has_text:
            raise error("no_tokenizer")
        return await self._run_in_thread(self.tokenizer.decode, token_ids, False)

    def token_text(self, token_id: int) -> str:
        """The text of a single token."""
        return self.tokenizer.decode([token_id], skip_special_tokens=False)

    def log_request(self, request_id: str, prompts: Sequence[Prompt], params: SamplingParams) -> None:
        """Log a request that is about to start, with --enable-log-requests."""
        if self.log_prompts is None:
            return
        length = None if math.isinf(self.log_prompts) else int(self.log_prompts)
        shown = [(prompt.token_ids if prompt.text is None else prompt.text)[:length] for prompt in prompts]
        defaults = SamplingParams()
        changed = {name: value for name, value in vars(params).items() if value != getattr(defaults, name)}
        changed.pop("stop_strings", None)
        lengths = [len(prompt.token_ids) for prompt in prompts]
        request_logger.info("request %s: prompts %r of %s tokens, params %r", request_id, shown, lengths, changed)

    async def _run_in_thread(self, function: Any, *arguments: Any) -> Any:
        def guarded() -> Any:
            # A panic of the Rust tokenizer does not derive from Exception; it must fail this request only.
            try:
                return function(*arguments)
            except Exception:
                raise
            except BaseException as panic:
                raise error("request_failed", reason="the tokenizer failed on this text") from panic

        return await asyncio.get_running_loop().run_in_executor(self._threads, guarded)


class RequestTracker:
    """Counts one request to generate in ``num_in_flight`` and the request metrics, from its arrival to its end.

    arrival_time  when its head was read, on ``time.monotonic``; under load that is well before it is handled.
    """

    def __init__(self, service: Service, arrival_time: float) -> None:
        self.arrival_time = arrival_time
        self._service = service
        self._open = True
        service.num_in_flight += 1
        service.metrics.received.inc()

    def finish(self, reason: str) -> None:
        """The request has ended; ``reason`` is one of ``metrics.FINISH_REASONS``. Later calls do nothing."""
        if self._open:
            self._open = False
            self._service.num_in_flight -= 1
            self._service.metrics.request_ended(reason, time.monotonic() - self.arrival_time)


def fingerprint(name: str, model: Path, dtype: str) -> str:
    """``aiakq-<version>-<8 hex digits>`` of the model's name, its config.json, the dtype and the version."""
    digest = hashlib.sha256(f"{name}\0{dtype}\0".encode())
    config = model / "config.json"
    if config.is_file():
        digest.update(config.read_bytes())
    return f"aiakq-{aiakq.__version__}-{digest.hexdigest()[:8]}"
