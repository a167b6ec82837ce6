"""ServiceOptions: the server's options as handlers of requests read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from aiakq.arguments.server import ServerArguments
from aiakq.server.api.message_format import template_defaults
from aiakq.server.telemetry.observers import enable_request_log

#: Smallest default limit of a request body; models with long contexts have a larger one.
MIN_BODY_BYTES = 4 << 20
#: The same for models that read images, which clients send in base64.
MIN_IMAGE_BODY_BYTES = 48 << 20
#: The same for models that transcribe audio.
MIN_AUDIO_BODY_BYTES = 26 << 20
#: The same of all bodies and images together, whose pixels take up to 50 MB each.
MIN_TOTAL_IMAGE_BYTES = 4 << 30


@dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """Options for the contents of responses and the handling of requests.

    force_include_usage         every chunk of a stream has token counts.
    return_tokens_as_token_ids  default of the request field: represent tokens as token_id:N in log-probabilities.
    prompt_tokens_details       usage includes the number of tokens found in the prefix cache.
    per_request_metrics         responses with one sequence have the times of the request.
    keep_alive_seconds          seconds without output after which streams send a comment; 0 for never.
    stream_interval             tokens per chunk of a stream.
    max_body_bytes              maximum size of a request body; None for one that the context length determines.
    max_total_body_bytes        maximum size of all bodies and images; None for one that the former determines.
    unknown_fields              handling of unknown request fields.
    fair_share                  share the engine fairly between clients instead of requests.
    log_prompts                 number of characters or token ids of a prompt to log, or None to log no requests.
    log_outputs                 log what requests generate.
    template_kwargs             arguments of chat templates, below those of a request.
    root_path                   path prefix under which a proxy exposes the server.
    media_path                  folder of images that file:// URLs may name; None for none.
    media_domains               hosts from which images are fetched; empty for every public one.
    playground_servers          other servers that the playground may send requests to.
    """

    force_include_usage: bool = False
    return_tokens_as_token_ids: bool = False
    prompt_tokens_details: bool = True
    per_request_metrics: bool = False
    keep_alive_seconds: float = 0.0
    stream_interval: int = 1
    max_body_bytes: int | None = None
    max_total_body_bytes: int | None = None
    unknown_fields: str = "refuse"
    fair_share: bool = False
    log_prompts: float | None = None
    log_outputs: bool = False
    template_kwargs: Mapping[str, object] = field(default_factory=dict)
    root_path: str = ""
    media_path: str | None = None
    media_domains: Sequence[str] = ()
    playground_servers: Sequence[str] = ()

    @staticmethod
    def from_args(args: ServerArguments) -> ServiceOptions:
        """Return the options of ``args``; enables the log of requests.

        Raises ``option_conflict`` and what ``template_defaults`` raises.
        """
        return ServiceOptions(
            force_include_usage=args.enable_force_include_usage,
            return_tokens_as_token_ids=args.return_tokens_as_token_ids,
            per_request_metrics=args.enable_per_request_metrics,
            prompt_tokens_details=args.enable_prompt_tokens_details,
            keep_alive_seconds=args.sse_keep_alive_interval,
            stream_interval=args.stream_interval,
            max_body_bytes=args.max_body_bytes,
            max_total_body_bytes=args.max_total_body_bytes,
            unknown_fields=args.unknown_fields,
            fair_share=bool(args.fair_share),
            log_prompts=enable_request_log(args),
            log_outputs=args.enable_log_outputs,
            template_kwargs=template_defaults(args.default_chat_template_kwargs),
            root_path=args.root_path,
            media_path=args.allowed_local_media_path,
            media_domains=args.allowed_media_domains or (),
            playground_servers=args.playground_servers or (),
        )
