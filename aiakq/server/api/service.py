"""What every route works with: the model's names and limits, the tokenizer, the running generations, the state."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiakq
from aiakq.errors import AiakqError, error
from aiakq.runtime.engine.messages import ModelLimits
from aiakq.runtime.sampling_params import SamplingParams
from aiakq.runtime.text.output_processor import truncated
from aiakq.runtime.text.tokenizer import Tokenizer
from aiakq.server.api.chat_templates import Templates
from aiakq.server.api.protocol import ChatFields
from aiakq.server.api.request_manager import GenerationTable
from aiakq.server.api.request_stream import Prompt
from aiakq.server.process.engine_client import again
from aiakq.server.telemetry.metrics import Metrics

#: Requests, if --enable-log-requests; a logger of its own, so that its level is.
request_log = logging.getLogger("aiakq.requests")

#: The routes that generate.
COMPLETIONS, CHAT_COMPLETIONS = GENERATING = ("/v1/completions", "/v1/chat/completions")
#: Threads that tokenize: one long prompt must not hold up a short one.
TOKENIZE_THREADS = 2
#: Smallest limit of a request body; long contexts get more.
MIN_BODY_LIMIT = 4 << 20


class Service:
    """One served model.

    names        what clients may call it; the first is what answers say.
    sampling     default sampling values, from the model's generation_config.json.
    fingerprint  the same for the same model, dtype and version.
    root_path    path under which a proxy offers the server.
    admin        whether there are routes for the operator.
    log_prompts  most characters or token ids of a prompt in the log; None: requests are not logged.
    in_flight    requests that asked to generate and are not answered yet.
    closing      why no new request is taken; None while open.
    progress     how far loading is, for /ready.
    """

    def __init__(
        self,
        *,
        names: Sequence[str],
        model: str,
        dtype: str,
        limits: ModelLimits,
        sampling: Mapping[str, Any],
        tokenizer: Tokenizer,
        table: GenerationTable,
        metrics: Metrics,
        chat_template: str | None,
        response_role: str,
        max_body_bytes: int | None,
        progress: Callable[[], dict[str, Any]],
        root_path: str = "",
        admin: bool = False,
        log_prompts: float | None = None,
    ) -> None:
        self.names = tuple(names)
        self.model = model
        self.limits = limits
        self.sampling = dict(sampling)
        self.tokenizer = tokenizer
        self.table = table
        self.metrics = metrics
        self.response_role = response_role
        self.progress = progress
        self.root_path = root_path
        self.admin = admin
        self.log_prompts = log_prompts
        self.created = int(time.time())
        self.fingerprint = fingerprint(self.names[0], Path(model), dtype)
        self.body_limit = max_body_bytes or max(MIN_BODY_LIMIT, 8 * limits.max_model_len)
        self.in_flight = 0
        self.closing: AiakqError | None = None
        self.templates = Templates(tokenizer, chat_template, 4 * self.body_limit)
        self._threads = ThreadPoolExecutor(TOKENIZE_THREADS, "tokenize")

    def on_refusal(self, scope: Mapping[str, Any], failure: AiakqError) -> None:
        """Something before the routes refused a request; those to generate are counted like any other."""
        if scope["method"] == "POST" and scope["path"].removeprefix(self.root_path) in GENERATING:
            Ticket(self, scope["state"]["arrived"]).close("error")
            self.metrics.request_refused(failure)

    def check_open(self) -> None:
        """Raise why nothing can be generated now: there is no engine, or the server is shutting down."""
        failure = self.table.failure or self.closing
        if failure is not None:
            raise again(failure)

    def check_model(self, name: str | None) -> None:
        """Raise ``unknown_model`` unless ``name`` is served; no name means the only model there is."""
        if name is not None and name not in self.names:
            raise error("unknown_model", param="model", name=name[:64], known=", ".join(self.names))

    async def prompts(self, given: Sequence[str | list[int]], add_special_tokens: bool) -> list[Prompt]:
        """Tokenize the prompts that are text; off the event loop, which keeps answering meanwhile."""
        return [
            Prompt(one, await self.encode(one, add_special_tokens)) if isinstance(one, str) else Prompt(None, one)
            for one in given
        ]

    async def chat_prompt(self, chat: ChatFields, add_special_tokens: bool) -> Prompt:
        """The prompt of a conversation. Raises ``no_chat_template`` or ``chat_template``."""
        messages, arguments = chat.conversation(), chat.template_arguments()
        if not self.tokenizer.has_text:
            raise error("no_tokenizer")
        text = await self.templates.render(messages, arguments)
        return Prompt(text, await self.encode(text, add_special_tokens))

    def shortened(self, prompts: list[Prompt], params: SamplingParams) -> list[Prompt]:
        """The prompts that are left of those given, where the request wants only their ends."""
        if params.truncate_prompt_tokens is None:
            return prompts
        kept = [truncated(prompt.token_ids, params, self.limits) for prompt in prompts]
        return [
            prompt if ids == prompt.token_ids else Prompt(None, ids) for prompt, ids in zip(prompts, kept, strict=True)
        ]

    def load(self) -> dict[str, Any]:
        """How much work there is."""
        stats = self.table.stats
        return {
            "server_load": self.in_flight,
            "num_requests_running": stats.num_running,
            "num_requests_waiting": stats.num_waiting,
            "kv_cache_usage_perc": stats.kv_usage,
        }

    def log_request(self, request_id: str, prompts: Sequence[Prompt], params: SamplingParams) -> None:
        """A line about a request that is about to start, if the operator wants them."""
        if self.log_prompts is None:
            return
        most = None if math.isinf(self.log_prompts) else int(self.log_prompts)
        shown = [(one.token_ids if one.text is None else one.text)[:most] for one in prompts]
        defaults = SamplingParams()
        asked = {name: value for name, value in vars(params).items() if value != getattr(defaults, name)}
        asked.pop("stop_strings", None)
        lengths = [len(one.token_ids) for one in prompts]
        request_log.info("request %s: prompts %r of %s tokens, params %r", request_id, shown, lengths, asked)

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of ``text``."""
        return await self._in_thread(self.tokenizer.encode, text, add_special_tokens)

    async def decode(self, token_ids: list[int]) -> str:
        """The text of ``token_ids``, special tokens included."""
        if not self.tokenizer.has_text:
            raise error("no_tokenizer")
        return await self._in_thread(self.tokenizer.decode, token_ids, False)

    def token_text(self, token_id: int) -> str:
        """One token's own text."""
        return self.tokenizer.decode([token_id], skip_special_tokens=False)

    async def _in_thread(self, function: Any, *arguments: Any) -> Any:
        def guarded() -> Any:
            # A panic in the Rust tokenizer is no Exception; it must fail this request, not the thread's owner.
            try:
                return function(*arguments)
            except Exception:
                raise
            except BaseException as panic:
                raise error("request_failed", reason="the tokenizer failed on this text") from panic

        return await asyncio.get_running_loop().run_in_executor(self._threads, guarded)


class Ticket:
    """One request to generate, from arrival to its end; what ``in_flight`` and the request counters count.

    arrived  when its head was read, which among many at once is long before it is its turn.
    """

    def __init__(self, service: Service, arrived: float) -> None:
        self.arrived = arrived
        self._service = service
        self._open = True
        service.in_flight += 1
        service.metrics.received.inc()

    def close(self, reason: str) -> None:
        """The request ended; ``reason`` is one of ``metrics.REASONS``. Only the first call counts."""
        if self._open:
            self._open = False
            self._service.in_flight -= 1
            self._service.metrics.request_ended(reason, time.monotonic() - self.arrived)


def fingerprint(name: str, model: Path, dtype: str) -> str:
    """``aiakq-<version>-<8 hex digits>``, changing with the model's name, its config.json, the dtype or the version."""
    digest = hashlib.sha256(f"{name}\0{dtype}\0".encode())
    config = model / "config.json"
    if config.is_file():
        digest.update(config.read_bytes())
    return f"aiakq-{aiakq.__version__}-{digest.hexdigest()[:8]}"
