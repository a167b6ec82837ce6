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
    "no_answer": ErrorKind("There is no answer from {server}: {reason}", "", WORKER),
    "bench_failed": ErrorKind("{failed} of {total} requests failed; the first: {reason}.", "", WORKER),
    "got_worse": ErrorKind("Worse by more than {percent} %: {metrics}.", "", GATE),
    "counters_changed": ErrorKind(
        "{count} counters are not what they were: {counters}.",
        "If that is intended, write the file again: aiakq bench counters MODEL --output FILE",
        GATE,
    ),
    "undecided": ErrorKind(
        "The intervals are too wide for a verdict: {metrics}.",
        "Measure more runs or rounds, allow a wider --margin, or give --allow-undecided.",
        UNDECIDED,
    ),
    "other_machine": ErrorKind(
        "The results are of different machines: {differences}.",
        "Timings of one machine say nothing about another: {remedy}.",
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
    "model_unsupported": ErrorKind(
        "The architecture {architecture} is not supported: {reason}.",
        "Native families: {known}; any other decoder-only model that transformers can run with a replaceable "
        "attention works through --model-impl transformers.",
    ),
    "unsupported": ErrorKind("{what} is not supported.", "{hint}"),
    "architecture_unsupported": ErrorKind(
        "The architecture {architecture} is not supported: {reason}.",
        "Choose a model of another family; if aiakq should run this one, config.json is damaged: fetch it again.",
    ),
    "model_hub": ErrorKind(
        "'{name}' is not a local folder and could not be fetched from the hub: {reason}.",
        "Check the name and the network, or give a local folder.",
        ENVIRONMENT,
    ),
    "plugin": ErrorKind(
        "A plugin cannot be used: {reason}.", "Repair or uninstall that package; aiakq works without it.", ENVIRONMENT
    ),
    "tokenizer_missing": ErrorKind(
        "The model folder '{path}' has no tokenizer.",
        "Copy tokenizer.json and its other files there, name a folder that has them with --tokenizer, or use token ids "
        "only: --skip-tokenizer-init.",
    ),
    "tokenizer_extension": ErrorKind(
        "The tokenizer extension '{path}' cannot be used: {reason}.",
        "It has to define get_tokenizer(folder), which returns what encodes and decodes.",
    ),
    "tensor_mismatch": ErrorKind(
        "The checkpoint '{path}' does not fit its config: {reason}.",
        "Check that config.json and the weights belong together.",
    ),
    "tensor_inventory": ErrorKind(
        "The checkpoint '{path}' does not hold what its config says: {counts}.",
        "Check that config.json and the weights belong together.",
        details="{table}",
    ),
    "pickle_refused": ErrorKind(
        "The weights in '{path}' are pickles that could run code when they are opened: {reason}.",
        "Fetch the safetensors variant, or convert it where you trust it: transformers' from_pretrained, then "
        "save_pretrained.",
        UNSAFE,
    ),
    "path_outside_model": ErrorKind(
        "The model folder '{path}' names a file outside itself: {file!r}.",
        "Do not trust this folder; fetch the model again from its source.",
        UNSAFE,
    ),
    "format_unsupported": ErrorKind(
        "The checkpoint is quantized in a way aiakq does not read: {reason}.",
        "aiakq reads GPTQ, AWQ (gemm, gemv, gemv_fast), AutoRound, compressed-tensors with integers, and the formats "
        "of installed plugins.",
    ),
    "quantization_mismatch": ErrorKind(
        "--quantization is {wanted} but the checkpoint holds {found}.",
        "Leave --quantization away to use what the checkpoint says.",
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
        "The output '{path}' is the input folder, or lies inside it, or holds it.",
        "Choose a folder of its own; aiakq never writes into a model it reads.",
        CONFLICT,
    ),
    "output_locked": ErrorKind(
        "Another aiakq is writing to '{path}'.", "Wait for it to end, or choose another folder.", CONFLICT
    ),
    "output_failed": ErrorKind(
        "Writing '{path}' failed: {reason}.", "Nothing was left behind; remove the cause and repeat.", RESOURCES
    ),
    "source_changed": ErrorKind(
        "The model '{path}' changed while it was quantized: {files}.",
        "Nothing was published; repeat when nothing else writes to that folder.",
        CONFLICT,
    ),
    "served_model_changed": ErrorKind(
        "The model '{path}' changed while it was served: {files}.",
        "Start the server anew to serve what lies there now; better, write new models into new folders.",
        CONFLICT,
    ),
    "no_space": ErrorKind(
        "Writing '{path}' needs about {needed}, but {available} are free there.",
        "Free space, or choose a folder on another disk.",
        RESOURCES,
    ),
    "already_quantized": ErrorKind(
        "The model '{path}' is quantized already ({found}).",
        "Quantize from the original 16- or 32-bit checkpoint: a second rounding only adds error.",
    ),
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
    "option_conflict": ErrorKind("{option} does not go with {other}: {reason}.", "{hint}", USAGE),
    "calibration": ErrorKind("The calibration data {source} cannot be used: {reason}.", "{hint}"),
    "evaluation_text": ErrorKind(
        "The text for evaluation cannot be used: {reason}.", "Give a UTF-8 text of at least a few hundred words."
    ),
    "not_finite": ErrorKind("{what} holds values that are not finite.", "{hint}", NUMERIC, 500, "server_error"),
    "not_as_written": ErrorKind(
        "{layer} does not read back from the disk as it was written.",
        "Nothing was published. The disk or the memory is failing, or this is a bug: repeat, and report it if it "
        "happens again.",
        RESOURCES,
    ),
    "worker_failed": ErrorKind(
        "Worker {worker} failed: {reason}.",
        "Its own last lines are above; often it is too little memory: use fewer --workers. With --resume, finished "
        "blocks are kept.",
        WORKER,
    ),
    "worker_late": ErrorKind(
        "Worker {worker} sent no heartbeat for {limit:g} s.",
        "It hangs, or the machine is overloaded: use fewer --workers. With --resume, finished blocks are kept.",
        WORKER,
    ),
    "max_kl": ErrorKind(
        "No widths keep the divergence within {wanted} nats per token; the widest reach {reached}.",
        "Allow more, or use -quant_type weight_only_int8.",
        NUMERIC,
    ),
}
