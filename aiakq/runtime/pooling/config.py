"""PoolingConfig: how a model for embeddings or scores pools prompts, and how such models are recognized."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from aiakq.arguments.engine import EngineArguments
from aiakq.constraints import Constraint
from aiakq.errors import AiakqError, error
from aiakq.formats.config_values import malformed, read_value
from aiakq.formats.model_folder import first_architecture
from aiakq.runtime.config.encoder_families import encoder_of
from aiakq.runtime.pooling.colbert import ColBERT, read_colbert
from aiakq.runtime.pooling.sentence_transformers import (
    CrossEncoder,
    DenseModule,
    SentenceTransformer,
    read_cross_encoder,
    read_modules,
    read_prompts,
)
from aiakq.runtime.pooling.token_names import ids_by_token
from aiakq.runtime.protocol.pooling_params import POOLING_TYPES, Pooling, PoolingLimits
from aiakq.runtime.protocol.text_prompts import TextPrompts

_CLASSIFIER = "ForSequenceClassification"
#: Suffixes of generative classes whose names also end like those of pooling classes.
_GENERATORS = ("LMHeadModel", "ChatModel", "ChatGLMModel")
#: Generative classes whose names do not end with ForCausalLM, by the prefix of their family.
_FAMILIES = {"GPT2": "GPT2LMHeadModel"}
#: Aliases of --task.
_RENAMED = {"embedding": "embed"}
_MAX_LABELS = 2**20


@dataclass(frozen=True)
class PoolingConfig:
    """Configuration of a pooling model.

    limits        limits of requests.
    num_labels    number of outputs of the score layer; 0 for hidden states.
    label_tokens  two tokens whose difference of logits is the score, see OutputHead.
    architecture  the family's generative class, which has the same layers.
    stated        the class that config.json names.
    dense         Dense modules applied to pooled rows.
    max_length    maximum length of a text in tokens, if the model has its own limit.
    projection    see OutputHead.
    """

    limits: PoolingLimits
    num_labels: int
    label_tokens: tuple[int, int] | None
    architecture: str
    stated: str
    dense: tuple[DenseModule, ...] = ()
    max_length: int | None = None
    projection: int = 0

    @property
    def every_token(self) -> bool:
        """Whether pooling needs the output of every token of a prompt."""
        return self.limits.pooling.kind not in ("LAST", "CLS")

    @staticmethod
    def from_args(args: EngineArguments, folder: Path, raw: Mapping[str, object]) -> PoolingConfig | None:
        """Create it from --task and the files in ``folder``; return None for a generative model. ``raw`` is
        config.json.

        Raises ``bad_option``, ``option_conflict``, ``model_unsupported``, ``unsupported``, ``model_malformed``.
        """
        architecture = first_architecture(raw)
        task = _requested_task(args)
        pools = task == _POOLS
        if pools:
            task = "auto"
        embeds = task in ("auto", "embed", "reward") and not architecture.endswith(_CLASSIFIER)
        colbert = read_colbert(folder, architecture) if embeds and task != "reward" else None
        modules = read_modules(folder) if embeds and colbert is None else None
        if task == "auto":
            task = _task_of(architecture, raw, modules)
            task = "embed" if pools and task == "generate" else task
        if task == "generate":
            _check_generates(architecture)
            if args.override_pooler_config:
                reason = "a generative model does not pool"
                raise _conflict("--override-pooler-config", "--task generate", reason)
            return None
        if args.model_impl == "transformers":
            raise _conflict("--model-impl transformers", f"--task {task}", "only native models can be pooled")
        if encoder_of(architecture) is None:
            _check_causal(raw)
        else:
            _check_encoder(args, architecture)
        override = args.override_pooler_config or {}
        config = _pooled(task, architecture, folder, raw, modules, override)
        return config if colbert is None else config.of_colbert(colbert, raw, override)

    def of_colbert(self, colbert: ColBERT, raw: Mapping[str, object], override: Mapping[str, object]) -> PoolingConfig:
        """Return it with a vector per token. Raises ``unsupported`` and ``bad_option``."""
        if not self.limits.reads_both_ways:
            raise error("unsupported", what=f"ColBERT with a {self.stated}", hint="ColBERT of encoders is supported.")
        pooling = _override(Pooling("ALL", normalize=colbert.normalize), override, has_scores=False)
        if pooling.kind != "ALL":
            raise _bad_override(f"pooling_type: {pooling.kind}", "ALL: a ColBERT model has a vector per token")
        has_alibi = colbert.projection and raw.get("position_embedding_type") == "alibi"
        return replace(
            self,
            limits=msgspec.structs.replace(self.limits, pooling=pooling, late=colbert.texts, prompts=colbert.prompts),
            architecture="JinaBertModel" if has_alibi else self.architecture,
            dense=colbert.dense,
            projection=colbert.projection,
        )

    def limits_of(self, width: int) -> PoolingLimits:
        """Return the limits of requests to a model whose output has ``width`` values. Raises ``model_malformed``."""
        width = self.projection or width
        for module in self.dense:
            if module.inputs != width:
                reason = f"{module.path} has {module.inputs} inputs, but the module before it has {width} outputs"
                raise error("model_malformed", file="modules.json", reason=reason)
            width = module.outputs
        return msgspec.structs.replace(self.limits, width=width)

    def model_config(self, raw: Mapping[str, object]) -> dict[str, object]:
        """Return config.json with the generative class of the same layers as architecture."""
        return {**raw, "architectures": [self.architecture]}


#: The task of --runner pooling: that of the model's files, but not generate.
_POOLS = "pooling"


def _requested_task(args: EngineArguments) -> str:
    """Return the task that --task, --runner and --convert select: one of --task, or ``_POOLS``.

    Raises ``option_conflict`` if they contradict each other.
    """
    task, runner, convert = _RENAMED.get(args.task, args.task), args.runner, args.convert
    wanted = {"auto": "auto", "generate": "generate", "pooling": _POOLS}[runner]
    flag = f"--runner {runner}"
    if convert in ("embed", "classify"):
        if runner == "generate":
            raise _conflict(f"--convert {convert}", "--runner generate", "a generative model does not pool")
        # Whether a classifier gives a score or classes is in its files.
        wanted, flag = "embed" if convert == "embed" else _POOLS, f"--convert {convert}"
    if "auto" in (task, wanted):
        return wanted if task == "auto" else str(task)
    if task == wanted or (wanted == _POOLS and task != "generate" and not (convert == "classify" and task == "embed")):
        return str(task)
    raise _conflict(flag, f"--task {task}", "they name different tasks", "Give one of them.")


def _task_of(architecture: str, raw: Mapping[str, object], modules: SentenceTransformer | None) -> str:
    """Return the task of a model for --task auto."""
    if modules is not None:
        return "embed"
    if architecture.endswith(_CLASSIFIER):
        return "score" if len(_labels(raw)) == 1 else "classify"
    if encoder_of(architecture) is not None:
        return "embed"
    return "embed" if architecture.endswith("Model") and not architecture.endswith(_GENERATORS) else "generate"


def _check_generates(architecture: str) -> None:
    if architecture.endswith(_CLASSIFIER):
        raise _conflict(
            "--task generate", architecture, "that is no language model; --task classify or score serves it"
        )
    if encoder_of(architecture) is not None:
        raise _conflict("--task generate", architecture, "an encoder generates no text; --task embed serves it")


def _check_encoder(args: EngineArguments, architecture: str) -> None:
    """Raise ``option_conflict`` for what encoders do not have."""
    given = {
        "--tensor-parallel-size": args.tensor_parallel_size > 1,
        "--pipeline-parallel-size": args.pipeline_parallel_size > 1,
        "--enable-lora": args.enable_lora,
        "--speculative-config": args.speculative_config is not None,
        "--disable-sliding-window": args.disable_sliding_window,
    }
    for option, is_given in given.items():
        if is_given:
            reason = "an encoder computes whole texts in one process, with its own weights"
            raise _conflict(option, architecture, reason, "Leave it out; replicas share the load of several texts.")


def _check_causal(raw: Mapping[str, object]) -> None:
    """Raise ``unsupported`` for a model with bidirectional attention."""
    text = raw.get("text_config")
    for config in (raw, text if isinstance(text, Mapping) else {}):
        name, value = "is_causal", config.get("is_causal")
        if value is None or value is True:
            name, value = "use_bidirectional_attention", config.get("use_bidirectional_attention")
            if not value:
                continue
        hint = f"""If it was trained with causal attention nevertheless, use --hf-overrides '{{"{name}": """
        hint += ("true" if name == "is_causal" else "false") + "}'."
        raise error("unsupported", what=f"A model with bidirectional attention ({name} is {value!r:.32})", hint=hint)


def _family(architecture: str) -> str:
    """Return the generative class of a family, given any of its classes; of an encoder, that without a head."""
    if (encoder := encoder_of(architecture)) is not None:
        return encoder
    if architecture.endswith(_GENERATORS) or not architecture.endswith((_CLASSIFIER, "Model")):
        return architecture
    stem = architecture.removesuffix(_CLASSIFIER).removesuffix("Model").removesuffix("Text")
    return _FAMILIES.get(stem, f"{stem}ForCausalLM")


def _pooled(
    task: str,
    architecture: str,
    folder: Path,
    raw: Mapping[str, object],
    modules: SentenceTransformer | None,
    override: Mapping[str, object],
) -> PoolingConfig:
    is_classifier = architecture.endswith(_CLASSIFIER)
    labels = _labels(raw) if is_classifier else []
    if task in ("classify", "score") and not is_classifier:
        reason = "a model without labels has no scores"
        hint = "With --task embed, /score compares the embeddings of two texts."
        raise _conflict(f"--task {task}", architecture, reason, hint)
    if task == "embed" and is_classifier:
        raise _conflict("--task embed", architecture, "that has scores instead of embeddings", "Leave --task out.")
    if task == "score" and len(labels) != 1:
        reason = f"it has {len(labels)} labels, and a score is one number"
        raise _conflict("--task score", architecture, reason, "--task classify serves it.")
    tokens = _label_tokens(folder, raw) if is_classifier else None
    pairs = read_cross_encoder(folder) if is_classifier and tokens is None else CrossEncoder()
    default = _default(task, raw, modules, pairs, len(labels))
    pooling = _override(default, override, bool(labels))
    encodes = encoder_of(architecture) is not None
    if encodes and is_classifier and pooling.kind != default.kind:
        raise _bad_override(f"pooling_type: {pooling.kind}", f"{default.kind}, which the model's labels are read from")
    dense = () if modules is None or task != "embed" else modules.dense
    return PoolingConfig(
        limits=PoolingLimits(
            task=task,
            pooling=pooling,
            width=0,  # known once the model is loaded
            dimensions=_dimensions(raw) if task == "embed" else None,
            labels=labels,
            concatenates=tokens is not None,
            reads_both_ways=encodes,
            prompts=read_prompts(folder) if task == "embed" else TextPrompts(),
        ),
        num_labels=len(labels),
        label_tokens=tokens,
        architecture=_family(architecture),
        stated=architecture,
        dense=dense,
        max_length=pairs.max_length if modules is None else modules.max_length,
    )


def _default(
    task: str, raw: Mapping[str, object], modules: SentenceTransformer | None, pairs: CrossEncoder, num_labels: int
) -> Pooling:
    """Return the default pooling of a model, from its files or else vLLM's defaults."""
    if task == "reward":
        return Pooling("ALL")
    encoder = encoder_of(first_architecture(raw))
    if num_labels:
        means = encoder == "ModernBertModel" and raw.get("classifier_pooling") == "mean"
        kind = "LAST" if encoder is None else "MEAN" if means else "CLS"
        return Pooling(kind, activation=_activation(raw, pairs, num_labels))
    if modules is None:
        # sentence-transformers, too, takes the mean of an encoder's outputs if nothing is configured.
        return Pooling("LAST" if encoder is None else "MEAN", normalize=True)
    return Pooling(modules.pooling, normalize=modules.normalize)


#: Keys of --override-pooler-config and their types.
_KEYS = {
    **{"pooling_type": str, "normalize": bool, "softmax": bool, "use_activation": bool},
    **{"seq_pooling_type": str, "tok_pooling_type": str, "step_tag_id": int, "task": str},
}


def _override(pooling: Pooling, override: Mapping[str, object], has_scores: bool) -> Pooling:
    """Return ``pooling`` with --override-pooler-config applied. Raises ``bad_option``."""
    override = _without_unsupported(override)
    for name, value in override.items():
        if name not in _KEYS:
            raise _bad_override(name, "one of " + ", ".join(_KEYS))
        if value is not None and (refused := Constraint(type=_KEYS[name]).refusal(value)) is not None:
            raise _bad_override(f"{name}: {value!r:.64}", refused.expected)
    override = _older_keys(override, has_scores)
    kind = _kind(str(override.get("pooling_type") or "").upper(), pooling.kind, override.get("task"), has_scores)
    if kind not in POOLING_TYPES:
        raise _bad_override(f"pooling_type: {kind:.64}", "one of " + ", ".join(POOLING_TYPES))
    step = override.get("step_tag_id")
    if (kind == "STEP") != (step is not None):
        raise _bad_override(
            f"pooling_type: {kind}, step_tag_id: {step}", "a step_tag_id with STEP, and with nothing else"
        )
    activation, normalize = pooling.activation, pooling.normalize
    if override.get("softmax") is not None:
        activation = (activation or "softmax") if override["softmax"] else ""
    if override.get("normalize") is not None:
        normalize = override["normalize"]
    return Pooling(kind, normalize, activation, step_tag_id=step)


#: Keys of vLLM's pooler config that only have their neutral values here, and why.
_NEUTRAL_ONLY: Mapping[str, tuple[tuple[object, ...], str]] = {
    "dimensions": ((), "left out: the field dimensions of a request truncates embeddings"),
    "enable_chunked_processing": ((False,), "false: a long text is not split into several"),
    "max_embed_len": ((), "left out: --max-model-len is the longest text"),
    "logit_mean": ((0,), "0: scores are those of the model"),
    "logit_sigma": ((1,), "1: scores are those of the model"),
    "returned_token_ids": ((), "left out: rewards are those of all labels"),
}
_WITHOUT_EFFECT = "enable_flash_late_interaction"


def _without_unsupported(override: Mapping[str, object]) -> dict[str, Any]:
    """Return the settings without those that have no effect. Raises ``bad_option`` for those that would have one."""
    kept = {name: value for name, value in override.items() if name != _WITHOUT_EFFECT}
    for name, (neutral, expected) in _NEUTRAL_ONLY.items():
        value = kept.pop(name, None)
        if value is not None and not any(
            value == one and isinstance(value, bool) is isinstance(one, bool) for one in neutral
        ):
            raise _bad_override(f"{name}: {value!r:.64}", expected)
    return kept


def _kind(given: str, default: str, task: str | None, has_scores: bool) -> str:
    """Return the kind of pooling, of which vLLM's ``task`` says whether it has one row. Raises ``bad_option``."""
    kind = given or default
    if task is None:
        return kind
    name = "classify" if has_scores else "embed"
    if task not in (name, f"token_{name}"):
        raise _bad_override(f"task: {task:.64}", f"{name} or token_{name} for this model")
    by_token = kind in ("ALL", "STEP")
    if by_token is (task == name):
        if given:
            raise _bad_override(f"task: {task}, pooling_type: {given:.64}", "one that goes with the other")
        return "LAST" if by_token else "ALL"
    return kind


def _older_keys(override: Mapping[str, object], has_scores: bool) -> dict[str, Any]:
    """Return the settings with the newer keys of vLLM replaced by the older ones. Raises ``bad_option``.

    ``use_activation`` is ``normalize`` for embeddings. For scores, true keeps the model's own activation.
    """
    values = {name: value for name, value in override.items() if value is not None}
    for newer, older in (
        ("seq_pooling_type", "pooling_type"),
        ("tok_pooling_type", "pooling_type"),
        ("use_activation", "softmax" if has_scores else "normalize"),
    ):
        if newer not in values:
            continue
        value = values.pop(newer)
        if older == "softmax" and value:
            continue
        if values.setdefault(older, value) != value:
            raise _bad_override(f"{newer}: {value!r:.64}, {older}: {values[older]!r:.64}", "one of the two")
    return values


def _bad_override(value: str, expected: str) -> AiakqError:
    return error("bad_option", option="--override-pooler-config", value=value, expected=expected, hint="")


#: Activations of sentence-transformers' cross-encoders -> ours.
_FUNCTIONS = {"Identity": "", "Sigmoid": "sigmoid"}


def _activation(raw: Mapping[str, object], pairs: CrossEncoder, num_labels: int) -> str:
    """Return the activation of scores: the cross-encoder's if there is one, else that of transformers' pipelines."""
    nested = raw.get("sentence_transformers")
    stated = pairs.activation or (nested.get("activation_fn") if isinstance(nested, Mapping) else None)
    stated = stated or raw.get("sbert_ce_default_activation_function")
    if stated is not None and num_labels == 1:
        name = str(stated).rpartition(".")[2]
        if name not in _FUNCTIONS:
            hint = "aiakq knows Identity and Sigmoid."
            raise error("unsupported", what=f"The activation of scores {stated!r:.100}", hint=hint)
        return _FUNCTIONS[name]
    problem = raw.get("problem_type")
    if problem == "regression":
        return ""
    if problem == "multi_label_classification" or num_labels == 1:
        return "sigmoid"
    return "softmax"


def _labels(raw: Mapping[str, object]) -> list[str]:
    """Return the label names as transformers determines them. Raises ``model_malformed``."""
    if raw.get("classifier_from_token") is not None:
        return ["LABEL_0"]
    names, count = raw.get("id2label"), raw.get("num_labels")
    if names is None:
        count = read_value(raw, Constraint(type=int, low=1, high=_MAX_LABELS), "num_labels", default=2)
        return [f"LABEL_{index}" for index in range(count)]
    if not isinstance(names, Mapping) or not 0 < len(names) <= _MAX_LABELS:
        raise error("model_malformed", file="config.json", reason="id2label is no object with names")
    if count is not None and count != len(names):
        reason = f"num_labels is {count!r:.64}, but id2label names {len(names)}"
        raise error("model_malformed", file="config.json", reason=reason)
    labels = [names.get(str(index)) for index in range(len(names))]
    if not all(isinstance(name, str) for name in labels):
        raise error("model_malformed", file="config.json", reason="id2label does not name the labels 0, 1, ...")
    return [str(name) for name in labels]


def _label_tokens(folder: Path, raw: Mapping[str, object]) -> tuple[int, int] | None:
    """Return the tokens (negative, positive) whose logits give the score; None for a model with a score layer."""
    words = raw.get("classifier_from_token")
    if words is None:
        return None
    if raw.get("is_original_qwen3_reranker") is not True or not isinstance(words, list) or len(words) != 2:
        hint = (
            """For Qwen3-Reranker, use: "is_original_qwen3_reranker": true, "classifier_from_token": ["no", "yes"]."""
        )
        raise error("unsupported", what=f"A score of the tokens {words!r:.64}", hint=hint)
    ids = ids_by_token(folder)
    against, for_it = (ids.get(word) if isinstance(word, str) else None for word in words)
    if type(against) is not int or type(for_it) is not int:
        hint = "classifier_from_token names two tokens as tokenizer.json spells them."
        raise error("unsupported", what=f"A score of the tokens {words!r:.64}, which the tokenizer lacks", hint=hint)
    return against, for_it


def _dimensions(raw: Mapping[str, object]) -> list[int] | None:
    """See PoolingLimits. Raises ``model_malformed``."""
    listed = raw.get("matryoshka_dimensions")
    if listed is not None:
        if not isinstance(listed, list) or not all(type(size) is int and size > 0 for size in listed):
            raise malformed("matryoshka_dimensions", listed, "a list of positive integers")
        return sorted(listed)
    return [] if raw.get("is_matryoshka") is True else None


def _conflict(option: str, other: str, reason: str, hint: str = "Leave it out.") -> AiakqError:
    return error("option_conflict", option=option, other=other, reason=reason, hint=hint)
