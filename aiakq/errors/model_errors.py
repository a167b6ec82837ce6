"""Errors of commands, of model folders and of quantize."""

from __future__ import annotations

from aiakq.errors.kind import (
    CONFLICT,
    ENVIRONMENT,
    GATE,
    NUMERIC,
    RESOURCES,
    UNDECIDED,
    UNSAFE,
    USAGE,
    WORKER,
    ErrorKind,
)

COMMAND_ERRORS = {
    # --- the command line ------------------------------------------------------------------------------------------
    "usage": ErrorKind("{reason}", "{hint}", USAGE),
    "system_unsupported": ErrorKind(
        "aiakq does not run on {system}.", "Use Linux; on Windows, that is WSL 2.", ENVIRONMENT
    ),
    "option_refused": ErrorKind("{option} is not available: {reason}.", "Leave it out.", USAGE),
    "bad_option": ErrorKind("{option} is {value!r}, which is not {expected}.", "{hint}", USAGE),
    "no_parser": ErrorKind("No parser matches the model's chat template.", "Set {option} to one of {names}.", USAGE),
    # --- bench -----------------------------------------------------------------------------------------------------
    "bad_gate": ErrorKind(
        "The gate {gate!r} cannot be read: {reason}.",
        "Write it like 'tpot_ms.p50>50': a key of the JSON result, an operator, a number.",
        USAGE,
    ),
    "gate_failed": ErrorKind("{failed} of {total} gates failed: {gates}.", "", GATE),
    "result_has_warnings": ErrorKind(
        "--strict: the result has {count} warning(s); the first: {first}.",
        "Measure again without what it warns of, or without --strict.",
        GATE,
    ),
    "server_unreachable": ErrorKind(
        "No server answers at {url}: {reason}.", "Start one with: aiakq serve --model DIR", ENVIRONMENT
    ),
    "server_key": ErrorKind(
        "The server at {url} {problem}.", "Give its key with --api-key, or in the variable AIAKQ_API_KEY.", ENVIRONMENT
    ),
    "no_answer": ErrorKind("{server} does not respond: {reason}", "", WORKER),
    "request_refused": ErrorKind("{server} refused the request: {reason}", "", WORKER),
    "no_result": ErrorKind(
        "{file} is no benchmark result: {reason}.",
        "Give the JSON that aiakq bench, vllm bench or guidellm wrote, or a folder of such files.",
    ),
    "bench_failed": ErrorKind("{failed} of {total} requests failed; the first: {reason}.", "", WORKER),
    "got_worse": ErrorKind("Worse by more than {percent} %: {metrics}.", "", GATE),
    "counters_changed": ErrorKind(
        "{count} counters have changed: {counters}.",
        "If that is intended, update the file: aiakq bench counters MODEL --output FILE",
        GATE,
    ),
    "undecided": ErrorKind(
        "The intervals are too wide for a verdict: {metrics}.",
        "Measure more runs or rounds, allow a wider --margin, or give --allow-undecided.",
        UNDECIDED,
    ),
    "other_machine": ErrorKind(
        "The results come from different machines: {differences}.",
        "Timings of different machines are not comparable: {remedy}.",
        CONFLICT,
    ),
    "nothing_to_compare": ErrorKind("{base} and {new} have no metric in common.", "Compare results of one benchmark."),
    "side_failed": ErrorKind("{side} failed: {reason}.", "", WORKER),
}

FOLDER_ERRORS = {
    "model_missing": ErrorKind(
        "There is no model at '{path}'.",
        "Give a folder with config.json and *.safetensors, or a hub name (org/name) while online.",
    ),
    "model_is_file": ErrorKind("'{path}' is {kind}, not a model's folder.", "{hint}"),
    "model_incomplete": ErrorKind(
        "The model folder '{path}' is incomplete: {missing}.",
        "Copy or download it again; aiakq reads config.json and every shard its index names.",
    ),
    "model_malformed": ErrorKind(
        "{file} cannot be read: {reason}.", "The file is damaged or not what its name says; fetch it again."
    ),
    "broken_link": ErrorKind(
        "{file} of the model folder '{path}' is {problem}.",
        "Put the file itself there, or fetch the model again.",
    ),
    "generation_config": ErrorKind(
        "{file} sets {key} to {value}, which is not {allowed}.",
        "Correct the file{otherwise}.",
    ),
    "config_key_unsupported": ErrorKind(
        "config.json has {key} = {value}, which is not supported: {reason}.",
        "If it has no effect on the answers, remove it from the file, or use --hf-overrides '{{\"{key}\": null}}'.",
    ),
    "processor_key_unsupported": ErrorKind(
        "{file} has {key} = {value}, which transformers' {kind} does not read.",
        "If it has no effect on the answers, remove it from the file; text is read nevertheless.",
    ),
    "text_model_unnamed": ErrorKind(
        "config.json does not say which language model is inside the {outer}: its text_config has no model_type.",
        "Take config.json of the original release, or give the family of the language model: "
        '--hf-overrides \'{{"text_config": {{"model_type": "llama"}}}}\'.',
    ),
    "model_unsupported": ErrorKind(
        "The architecture {architecture} is not supported: {reason}.",
        "Native families: {known}; other decoder-only models work through --model-impl transformers if "
        "transformers lets their attention be replaced.",
    ),
    "unsupported": ErrorKind("{what} is not supported.", "{hint}"),
    "tuning": ErrorKind(
        "The quantized model cannot be tuned here: {reason}.",
        "{hint}",
        RESOURCES,
    ),
    "architecture_unsupported": ErrorKind(
        "The architecture {architecture} is not supported: {reason}.",
        "Choose a model of another family; if aiakq should run this one, config.json is damaged: fetch it again.",
    ),
    "model_hub": ErrorKind(
        "'{name}' is not a local folder and could not be fetched from the hub: {reason}.",
        "Check the name and the network, or give a local folder.",
        ENVIRONMENT,
    ),
    "model_storage": ErrorKind(
        "The model '{name}' could not be fetched: {reason}.",
        "Check the address, the credentials in the environment and the network, or give a local folder.",
        ENVIRONMENT,
    ),
    "plugin": ErrorKind(
        "A plugin cannot be used: {reason}.", "Repair or uninstall that package; aiakq works without it.", ENVIRONMENT
    ),
    "tokenizer_missing": ErrorKind(
        "The model folder '{path}' has no tokenizer{elsewhere}.",
        "Copy tokenizer.json and its other files there, or name a folder that has them with --tokenizer. A server "
        "or LLM for token ids only needs none: --skip-tokenizer-init.",
    ),
    "mistral_common_missing": ErrorKind(
        "{file} is a tokenizer in Mistral's format, and the package {package}, which reads it, is not installed.",
        "Run pip install 'aiakq[mistral]', or name a folder with tokenizer.json with --tokenizer.",
        ENVIRONMENT,
    ),
    "tokenizer_extension": ErrorKind(
        "The tokenizer extension '{path}' cannot be used: {reason}.",
        "It must define get_tokenizer(folder), which returns an object that encodes and decodes.",
    ),
    "tensor_mismatch": ErrorKind(
        "The checkpoint '{path}' does not fit its config: {reason}.",
        "Check that config.json and the weights belong together.",
    ),
    "tensor_inventory": ErrorKind(
        "The tensors of the checkpoint '{path}' do not match its config: {counts}.",
        "Check that config.json and the weights belong together.",
        details="{table}",
    ),
    "pickle_refused": ErrorKind(
        "The weights in '{path}' are pickles, which could run code when they are loaded: {reason}.",
        "Download the safetensors variant, or convert it in an environment where you trust it, with transformers' "
        "from_pretrained and save_pretrained.",
        UNSAFE,
    ),
    "path_outside_model": ErrorKind(
        "The model folder '{path}' names a file outside itself: {file!r}.",
        "If you made this link, copy what it points to: cp -rL {path!q} COPY. If not, do not trust this folder; fetch "
        "the model again from its source.",
        UNSAFE,
    ),
    "format_unsupported": ErrorKind(
        "The quantization format of the checkpoint is not supported: {reason}.",
        "aiakq reads GPTQ, AWQ (gemm, gemv, gemv_fast), AutoRound, compressed-tensors with integers, FP8 or FP4, FP8 "
        "(fp8, fbgemm_fp8), modelopt, GGUF, bitsandbytes, MLX, HQQ, Marlin, torchao, optimum-quanto, QQQ, BitNet, "
        "AQLM, SqueezeLLM, VPTQ, and formats of installed plugins. Quantize the original model with aiakq quantize, or "
        "take a release in one of them.",
    ),
    "gguf_unsupported": ErrorKind(
        "This GGUF file is not supported: {reason}.",
        "Take the Hugging Face model that it was made from, or another release of it: GPTQ, AWQ, FP8 or "
        "compressed-tensors.",
    ),
    "gguf_not_written": ErrorKind(
        "{what} cannot be written as a GGUF file: {reason}.",
        "Write another format (--to bf16, compressed-tensors), or use the converter of llama.cpp, which may leave out "
        "what such files do not hold.",
    ),
    "gguf_choice": ErrorKind(
        "'{path}' {problem}: {found}.", "Name one by its quantization, like {example}, or give the file itself."
    ),
    "mistral_unsupported": ErrorKind(
        "This model in Mistral's format is not supported: {reason}.",
        "Take its release in Hugging Face's format: config.json and model*.safetensors.",
    ),
    "cache_unwritable": ErrorKind(
        "The config and tokenizer of the model cannot be written to '{path}': {reason}.",
        "Set XDG_CACHE_HOME to a folder that can be written.",
        ENVIRONMENT,
    ),
    "quantization_mismatch": ErrorKind(
        "--quantization is {wanted}, but the checkpoint contains {found}.",
        "Leave out --quantization to use the checkpoint's method.",
        USAGE,
    ),
    "rounding_at_load": ErrorKind(
        "--quantization {wanted} rounds the weights of a model, and these are of something else, which stays as it is.",
        "Leave it out.",
        USAGE,
    ),
    "remote_code": ErrorKind(
        "The model '{path}' needs to run its own Python code.",
        "Read that code; if you trust it, repeat with --trust-remote-code.",
        UNSAFE,
    ),
}

QUANTIZE_ERRORS = {
    "output_exists": ErrorKind(
        "The output '{path}' already exists and is not empty.",
        "Choose another folder, or add --overwrite to replace it.",
        CONFLICT,
    ),
    "output_not_folder": ErrorKind(
        "The output '{path}' exists and is not a folder.",
        "Choose another path; --overwrite only replaces models.",
        CONFLICT,
    ),
    "output_not_model": ErrorKind(
        "The output '{path}' {reason}, so --overwrite does not delete it.",
        "Choose another folder, or remove that one yourself.",
        CONFLICT,
    ),
    "output_is_input": ErrorKind(
        "The output '{path}' is the input folder, lies inside it, or contains it.",
        "Choose a separate folder; aiakq never writes into a model it reads.",
        CONFLICT,
    ),
    "output_locked": ErrorKind(
        "Another aiakq process is writing to '{path}'.", "Wait until it ends, or choose another folder.", CONFLICT
    ),
    "output_failed": ErrorKind(
        "Writing '{path}' failed: {reason}.", "Nothing was left behind; remove the cause and repeat.", RESOURCES
    ),
    "source_changed": ErrorKind(
        "The model '{path}' changed while it was read: {files}.",
        "Nothing was published; repeat when nothing else writes to that folder.",
        CONFLICT,
    ),
    "served_model_changed": ErrorKind(
        "The model '{path}' changed while it was served: {files}.",
        "Restart the server to serve the new files. It is better to write new models into new folders.",
        CONFLICT,
    ),
    "no_space": ErrorKind(
        "Writing '{path}' needs about {needed}, but only {available} are free.",
        "Free space, or choose a folder on another disk.",
        RESOURCES,
    ),
    "weights_unknown": ErrorKind(
        "The weights of the model '{path}' are integers, and its config does not say what they mean.",
        "Add the quantization_config to its config.json, or quantize the original model.",
    ),
    "not_quantized": ErrorKind(
        "The model '{path}' is not quantized.",
        "aiakq convert changes the format of quantized models; quantize this one with aiakq quantize.",
    ),
    "conversion_inexact": ErrorKind("{layer} cannot be written as {to} as it is: {reason}.", "{hint}", USAGE),
    "group_size": ErrorKind(
        "A group of {group_size} does not divide the {k} inputs of {layer}.",
        "Group sizes that work for every layer of this model: {choices}.",
        USAGE,
    ),
    "layer_shape": ErrorKind(
        "The layer {layer} with {n} outputs and {k} inputs cannot be written: {reason}.",
        "-quant_type weight_only_int8 and smooth_quant take any shape.",
        USAGE,
    ),
    "tensor_parallel": ErrorKind(
        "This model cannot be split over {tp} GPUs: {reason}.", "Values of -tp that work: {choices}.", USAGE
    ),
    "option_conflict": ErrorKind("{option} cannot be combined with {other}: {reason}.", "{hint}", USAGE),
    "calibration": ErrorKind("The calibration data {source} cannot be used: {reason}.", "{hint}"),
    "evaluation_text": ErrorKind(
        "The text for evaluation cannot be used: {reason}.", "Give a UTF-8 text of at least a few hundred words."
    ),
    "no_lm_eval": ErrorKind(
        "lm-eval, which runs --tasks, is not installed.", "Run pip install 'aiakq[eval]', or leave out --tasks.", USAGE
    ),
    "tasks": ErrorKind("lm-eval cannot run the tasks {tasks}: {reason}.", "{hint}"),
    "not_finite": ErrorKind("{what} contains values that are not finite.", "{hint}", NUMERIC, 500, "server_error"),
    "not_as_written": ErrorKind(
        "{layer} differs from what was written when it is read back from disk.",
        "Nothing was published. The disk or the memory is failing, or this is a bug: repeat, and report it if it "
        "happens again.",
        RESOURCES,
    ),
    "worker_failed": ErrorKind(
        "Worker {worker} failed: {reason}.",
        "Its last output is above; often it ran out of memory: use fewer --workers. With --resume, finished blocks are "
        "kept.",
        WORKER,
    ),
    "worker_late": ErrorKind(
        "Worker {worker} sent no heartbeat for {limit:g} s.",
        "It hangs, or the machine is overloaded: use fewer --workers. With --resume, finished blocks are kept.",
        WORKER,
    ),
    "max_kl": ErrorKind(
        "No bit widths keep the KL divergence within {wanted} nats per token; the largest reach {reached}.",
        "Allow more, or use -quant_type weight_only_int8.",
        NUMERIC,
    ),
}
