"""Errors of the runtime, of connections and of requests."""

from __future__ import annotations

from aiakq.errors.kind import BUG, ENVIRONMENT, NUMERIC, RESOURCES, UNSAFE, USAGE, WORKER, ErrorKind

RUNTIME_ERRORS = {
    "device": ErrorKind("The device {device} cannot be used: {reason}.", "{hint}", ENVIRONMENT),
    "no_memory": ErrorKind(
        "There is no memory for the KV cache: {available} free, {needed} needed for one request of "
        "{max_model_len} tokens.",
        "Lower --max-model-len (at most {fits} fits){also} or free memory.",
        RESOURCES,
    ),
    "weights_too_large": ErrorKind(
        "The weights of '{path}' need at least {needed} of memory; {available} are free {where}.",
        "Serve a quantized copy (aiakq quantize loads one block at a time), use more GPUs or machines with -tp or -pp, "
        "or free memory.",
        RESOURCES,
    ),
    "out_of_memory": ErrorKind(
        "Out of memory: {reason}.",
        "Use a smaller model or batch, or free memory; --debug shows where it happened.",
        RESOURCES,
        500,
        "server_error",
    ),
    "open_files": ErrorKind("The limit on open files is reached.", "Raise the limit: ulimit -n 4096.", RESOURCES),
    "disk_failed": ErrorKind("'{path}' cannot be read or written: {reason}.", "Check the disk.", RESOURCES),
    "port_in_use": ErrorKind(
        "Port {port} on {host} is in use.", "Choose another with --port, or --port 0 for any free port.", ENVIRONMENT
    ),
    "engine_dead": ErrorKind(
        "The engine process ended: {reason}.",
        "Its last output is above; start the server again.",
        WORKER,
        503,
        "service_unavailable_error",
    ),
    "model_broken": ErrorKind(
        "The model's outputs are not finite, not even for a prompt of one token.",
        "Load it again; if it happens again immediately, the weights are damaged or overflow in this --dtype.",
        NUMERIC,
        500,
        "server_error",
    ),
    "no_key": ErrorKind(
        "Anyone who can reach {host} could use this server, because no API key is set.",
        "Set one with --api-key-file or AIAKQ_API_KEY, or pass --allow-no-key if a gateway in front of it checks keys.",
        UNSAFE,
    ),
    "engine_start": ErrorKind("The engine process could not start: {reason}.", "{hint}", WORKER),
}

RANK_ERRORS = {
    "ranks_unavailable": ErrorKind(
        "Several ranks cannot be used here: {reason}.", "Use fewer ranks or replicas.", USAGE
    ),
    "rank_failed": ErrorKind(
        "Rank {rank} failed: {reason}.", "Its last output is above; often it ran out of memory.", WORKER, 503
    ),
    "rank_late": ErrorKind(
        "Rank {rank} timed out after {limit:g} s: {operation}.",
        "It hangs, or its processors are busy with something else; --distributed-timeout-seconds allows more time.",
        WORKER,
        503,
    ),
    "ray_missing": ErrorKind(
        "Ray is not installed.",
        "Run pip install 'aiakq[ray]' on every node, or use --distributed-executor-backend mp on a single machine.",
        ENVIRONMENT,
    ),
    "traces_missing": ErrorKind(
        "Tracing needs the package {package}, which is not installed.",
        "Run pip install 'aiakq[traces]', or leave out --otlp-traces-endpoint.",
        ENVIRONMENT,
    ),
    "ray_unavailable": ErrorKind(
        "Ray cannot be used: {reason}.",
        "RAY_ADDRESS names the cluster; ray status shows its nodes.",
        ENVIRONMENT,
    ),
    "ray_resources": ErrorKind(
        "Ray did not place {count} processes within {limit:g} s: they need {needed}; free: {free}.",
        "Add nodes, stop other jobs, or lower -tp, -pp, --workers or AIAKQ_RAY_CPUS_PER_RANK.",
        RESOURCES,
    ),
    "rank_unreachable": ErrorKind(
        "Rank {rank}, at {here}, could not connect to rank {other}, at {there}, within {limit:g} s: {reason}.",
        "Ranks connect to any port of each other's nodes, at the addresses known to Ray: check routes, firewalls and "
        "network policies.",
        WORKER,
        503,
    ),
}
CONNECTION_ERRORS = {
    "invalid_api_key": ErrorKind(
        "The request has no valid API key.", "Send it as Authorization: Bearer KEY.", USAGE, 401, "authentication_error"
    ),
    "admin_key_required": ErrorKind(
        "This route needs a key to administrate the server.",
        "Send one of --admin-api-key as Authorization: Bearer KEY.",
        USAGE,
        403,
        "permission_error",
    ),
    "host_not_allowed": ErrorKind(
        "This server does not accept the name in the Host header.",
        "The operator adds names with --allowed-hosts.",
        USAGE,
        421,
    ),
    "origin_not_allowed": ErrorKind(
        "Web pages of this origin may not use the server.",
        "The operator allows origins with --allowed-origins.",
        USAGE,
        403,
        "permission_error",
    ),
    "invalid_http": ErrorKind("The request is not valid HTTP: {reason}.", "", USAGE),
    "headers_too_large": ErrorKind(
        "The request has more than {count} headers, or more than {limit} bytes of them.", "Send fewer.", USAGE, 431
    ),
    "unsupported_encoding": ErrorKind(
        "Compressed request bodies are not supported.", "Leave out Content-Encoding.", USAGE, 415
    ),
    "unsupported_media_type": ErrorKind(
        "Request bodies must be JSON.", "Send Content-Type: application/json.", USAGE, 415
    ),
    "form_expected": ErrorKind(
        "The request body of this route is a form.", "Send Content-Type: multipart/form-data.", USAGE, 415
    ),
    "form_malformed": ErrorKind("The request body is no valid form: {reason}.", "", USAGE),
    "read_timeout": ErrorKind("The request's {part} did not arrive within {limit:g} s.", "Send it faster.", USAGE, 408),
    "too_many_connections": ErrorKind(
        "There are too many connections: at most {limit} {scope}.",
        "Use fewer connections, or try again in a moment.",
        WORKER,
        503,
        "service_unavailable_error",
    ),
}

REQUEST_ERRORS = {
    "value_out_of_range": ErrorKind("{param} is {value!r}; allowed is {allowed}.", "", USAGE),
    "invalid_type": ErrorKind("{param} has the wrong type: {reason}.", "", USAGE),
    "invalid_json": ErrorKind("The request body is not valid JSON: {reason}.", "", USAGE),
    "duplicate_key": ErrorKind("The request body names {param} twice in one object.", "Name it once.", USAGE),
    "missing_field": ErrorKind("The request field {param} is missing.", "", USAGE),
    "unknown_field": ErrorKind(
        "The request field {param} is not known.",
        "{hint}",
        USAGE,
    ),
    "unsupported_parameter": ErrorKind("{param} is not supported: {reason}.", "", USAGE),
    "media_refused": ErrorKind("{param} cannot be read: {reason}.", "", USAGE),
    "media_failed": ErrorKind(
        "An image or the audio of the request cannot be encoded: {reason}.",
        "The files of the model may not belong together; its text is read.",
        BUG,
        500,
        "server_error",
    ),
    "no_pillow": ErrorKind(
        "Images cannot be read, because Pillow is not installed.", "pip install 'aiakq[images]'", ENVIRONMENT, 501
    ),
    "no_soundfile": ErrorKind(
        "Audio cannot be read, because soundfile, soxr or python-multipart is not installed.",
        "pip install 'aiakq[audio]'",
        ENVIRONMENT,
        501,
    ),
    "grammar_not_enforceable": ErrorKind("{param} cannot be enforced: {reason}.", "", USAGE),
    "grammar_failed": ErrorKind(
        "The text cannot be continued according to the request's grammar, which became too complex.",
        "Simplify the grammar.",
        USAGE,
    ),
    "invalid_token_id": ErrorKind(
        "{param} holds the token id {value}, outside 0..{last}.", "Use ids of this model's vocabulary.", USAGE
    ),
    "empty_prompt": ErrorKind("The prompt is empty.", "Send at least one token.", USAGE),
    "too_many_prompts": ErrorKind(
        "The request asks for {value} sequences; at most {limit} are allowed.", "Split it.", USAGE
    ),
    "task_mismatch": ErrorKind(
        "This model is served to {task} (--task {task}); it does not {wanted}.",
        "Ask a server of another model, or start one with --task {needed}.",
        USAGE,
    ),
    "context_length_exceeded": ErrorKind(
        "The prompt has {prompt} tokens{more}; the context holds {limit}.",
        "Shorten the prompt{lower}, or {otherwise}.",
        USAGE,
    ),
    "unknown_model": ErrorKind(
        "The model {name!r} is not served here.", "Served: {known}.", USAGE, 404, "invalid_request_error"
    ),
    "not_found": ErrorKind("There is no route {path}.", "See /docs.", USAGE, 404),
    "method_not_allowed": ErrorKind("{path} does not take {method}.", "See /docs.", USAGE, 405),
    "no_chat_template": ErrorKind(
        "The model has no chat template.", "Start the server with --chat-template FILE, or use /v1/completions."
    ),
    "no_tokenizer": ErrorKind(
        "There is no tokenizer, because --skip-tokenizer-init was given.",
        "Send token ids; outputs are token ids too.",
        USAGE,
    ),
    "no_default_template": ErrorKind(
        "The model's chat templates ({names}) are for other conversations, and none of them is the default.",
        "Start the server with --chat-template FILE, or use /v1/completions.",
    ),
    "chat_template": ErrorKind("The chat template refused the messages: {reason}.", ""),
    "template_loses": ErrorKind(
        "The chat template has no place for {what}, so that the model would not see them.",
        "Leave them out, or start the server with another --chat-template.",
    ),
    "template_loses_users": ErrorKind(
        "The chat template {source} {reason}.",
        "Give another template with --chat-template FILE.",
        http_status=500,
        type="server_error",
    ),
    "template_form": ErrorKind(
        "The chat template {source} does not show the text of users as --chat-template-content-format {form} gives it.",
        "Leave the option out: the form that the template takes is found by itself.",
    ),
    "template_unusable": ErrorKind(
        "The chat template {source} cannot be used: {reason}.",
        "Start the server with another one: --chat-template FILE.",
        http_status=500,
        type="server_error",
    ),
    "tokenization": ErrorKind("The text could not be tokenized: {reason}.", "Send another text.", USAGE),
    "tokenizer_mismatch": ErrorKind(
        "The tokenizer has {token!r} with the id {token_id}, but the model's vocabulary ends with the id {last}.",
        "Start the server with the tokenizer of the model: --tokenizer NAME.",
        http_status=500,
        type="server_error",
    ),
    "tokenizer_stuck": ErrorKind(
        "A text has waited {limit:g} s to be tokenized.",
        "Wait until the tokenizer's processes are restarted.",
        WORKER,
        503,
        "service_unavailable_error",
    ),
    "worker_lost": ErrorKind(
        "The processes that prepare requests ended twice while they worked on this one.",
        "Try again in a moment; if it happens again, the machine is short of memory or overloaded.",
        WORKER,
        503,
        "service_unavailable_error",
    ),
    "request_too_large": ErrorKind("The request body is larger than {limit} bytes.", "Split it.", USAGE, 413),
    "bodies_too_large": ErrorKind(
        "The bodies and images of all requests, or those of one client, are too large: at most {limit} bytes are "
        "allowed, and half of that from one client.",
        "Try again in a moment, or raise --max-total-body-bytes.",
        WORKER,
        503,
        "service_unavailable_error",
    ),
    "overloaded": ErrorKind(
        "{waiting} {what} are waiting already; at most {limit} are allowed.",
        "Try again in a moment, or raise {flag}.",
        WORKER,
        503,
        "service_unavailable_error",
    ),
    "queue_timeout": ErrorKind(
        "The request waited {limit:g} s without being started.",
        "Try again in a moment; --max-queue-seconds sets the time.",
        WORKER,
        503,
        "service_unavailable_error",
    ),
    "time_limit": ErrorKind(
        "The request did not finish within {limit:g} s.",
        "Ask for fewer tokens; --max-request-seconds sets the time.",
        WORKER,
        503,
        "service_unavailable_error",
    ),
    "slow_reader": ErrorKind(
        "More than {limit} bytes of the response were not read in time.", "Read faster.", USAGE, 408
    ),
    "numerical_error": ErrorKind("The request failed: {reason}.", "", NUMERIC, 500, "server_error"),
    "request_memory": ErrorKind(
        "The request does not fit into the server's memory, even alone.",
        "Ask for fewer prompt_logprobs, or try again; the operator can lower --max-num-batched-tokens.",
        RESOURCES,
        503,
        "service_unavailable_error",
    ),
    "engine_restarting": ErrorKind(
        "The engine is restarting: {reason}.", "Try again in a moment.", WORKER, 503, "service_unavailable_error"
    ),
    "engine_restarted": ErrorKind(
        "The engine ended before the response was complete: {reason}.",
        "The engine is restarting; repeat the request.",
        WORKER,
        503,
        "service_unavailable_error",
    ),
    "engine_timeout": ErrorKind(
        "The engine took longer than {limit:g} s for a step.",
        "The engine is restarting; repeat the request.",
        WORKER,
        500,
        "server_error",
    ),
    "request_quarantined": ErrorKind(
        "The engine ended twice while this request ran, so it is not retried.",
        "The request may be the cause; the server's log says how the engine ended.",
        WORKER,
        500,
        "server_error",
    ),
    "aborted": ErrorKind("The operator of the server stopped the request.", "", WORKER, 410, "request_aborted"),
    "nothing_left": ErrorKind(
        "The request cannot continue: {reason}.", "Allow more token ids, or fewer min_tokens or bad_words.", USAGE
    ),
    "request_failed": ErrorKind("The request failed: {reason}.", "", BUG, 500, "server_error"),
    "loading": ErrorKind(
        "The model is still loading.", "Try again in a moment.", WORKER, 503, "service_unavailable_error"
    ),
    "shutting_down": ErrorKind(
        "The server is shutting down.", "Send the request to another server.", WORKER, 503, "service_unavailable_error"
    ),
}
