"""From a checkpoint folder to an engine: weights into kernels, memory into pages, every phase timed."""

from __future__ import annotations

import gc
import importlib
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from aiakq.errors import error
from aiakq.formats.checkpoint import Checkpoint
from aiakq.kernels import bind
from aiakq.kernels.types import AttentionContext, QWeight
from aiakq.runtime.config import EngineConfig
from aiakq.runtime.engine import Engine, Phase
from aiakq.runtime.layers.linear import AnyLinear, Linear, QLinear
from aiakq.runtime.messages import ModelLimits
from aiakq.runtime.models import ARCHITECTURES, FAMILIES
from aiakq.runtime.models.decoder import Model, ModelInput
from aiakq.runtime.pages import PagePool
from aiakq.runtime.runner import ROW_MULTIPLE, Runner
from aiakq.runtime.scheduler import Scheduler

OnPhase = Callable[[Phase], None]


@dataclass
class CheckpointWeights:
    """The ``Weights`` a family builds itself from, read from a checkpoint; notes what was used and bound to what.

    excluded  implementations that may not be chosen (see ``--dequantize``).
    """

    checkpoint: Checkpoint
    dtype: torch.dtype
    device: torch.device
    excluded: frozenset[str] = frozenset()
    used: set[str] = field(default_factory=set)
    kinds: Counter[tuple[str, str, tuple[tuple[str, str], ...]]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.quantized = set(self.checkpoint.quantized_linears())
        self.names = self.checkpoint.inventory

    def has(self, name: str) -> bool:
        return name in self.names

    def tensor(self, name: str, *shape: int) -> Tensor:
        if name not in self.names:
            raise error("tensor_mismatch", path=self.checkpoint.path, reason=f"the tensor {name} is missing")
        found = tuple(self.names[name].shape)
        if found != shape:
            raise error(
                "tensor_mismatch",
                path=self.checkpoint.path,
                reason=f"{name} has the shape {list(found)}, config.json says {list(shape)}",
            )
        self.used.add(name)
        return self.checkpoint.tensor(name).to(device=self.device, dtype=self.dtype)

    def linear(self, name: str, n: int, k: int, *, bias: bool = False) -> AnyLinear:
        if name not in self.quantized:
            self.kinds[("w16", "torch", ())] += 1
            return Linear(self.tensor(f"{name}.weight", n, k), self.tensor(f"{name}.bias", n) if bias else None)
        weight = self.checkpoint.read_linear(name)
        if (weight.n, weight.k) != (n, k):
            raise error(
                "tensor_mismatch",
                path=self.checkpoint.path,
                reason=f"{name} holds {weight.n} x {weight.k} weights, config.json says {n} x {k}",
            )
        self.used.update(other for other in self.names if other.startswith(f"{name}."))
        bound = bind(_moved(weight, self.device), weight.problem(self.dtype, self.device), self.excluded)
        self.kinds[(weight.scheme, bound.choice.name, bound.choice.passed_over)] += 1
        return QLinear(bound)

    def unused(self) -> list[str]:
        """Tensors of the checkpoint that no layer asked for; those that can be computed again do not count."""
        ignored = ("rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias")
        tied = {"lm_head.weight"}
        return sorted(
            name for name in self.names if name not in self.used and name not in tied and not name.endswith(ignored)
        )


@dataclass
class DummyWeights:
    """Random ``Weights`` of the right shapes, the same for the same seed; for benchmarks of shapes."""

    dtype: torch.dtype
    device: torch.device
    seed: int
    kinds: Counter[tuple[str, str, tuple[tuple[str, str], ...]]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    def has(self, name: str) -> bool:
        return True

    def tensor(self, name: str, *shape: int) -> Tensor:
        value = torch.randn(shape, generator=self.generator).mul_(shape[-1] ** -0.5)
        if name.endswith("norm.weight"):
            value = torch.ones(shape)
        return value.to(device=self.device, dtype=self.dtype)

    def linear(self, name: str, n: int, k: int, *, bias: bool = False) -> AnyLinear:
        self.kinds[("w16", "torch", ())] += 1
        return Linear(self.tensor(name, n, k), self.tensor(name, n) if bias else None)


def _moved(weight: QWeight, device: torch.device) -> QWeight:
    if device.type == "cpu":
        return weight
    moved = {
        name: value.to(device)
        for name in ("codes", "scales", "zeros", "perm", "bias", "input_scale")
        if (value := getattr(weight, name)) is not None
    }
    return replace(weight, **moved)


def load_model(config: EngineConfig) -> tuple[Model, str]:
    """Build the model of ``config``; returns it with one line about its linear layers, for the start-up table.

    Raises AiakqError: model_unsupported, tensor_mismatch, model_*.
    """
    architecture = config.hf.architecture
    native = ARCHITECTURES.get(architecture)
    if native is None and config.model_impl == "aiakq":
        raise error(
            "model_unsupported",
            architecture=architecture,
            reason="aiakq has no model of its own for it",
            known=FAMILIES,
        )
    if native is None or config.model_impl == "transformers":
        from aiakq.runtime.models.transformers_model import load_transformers_model

        return load_transformers_model(config)
    weights: CheckpointWeights | DummyWeights
    if config.load_format == "dummy":
        if config.spec is not None:
            raise error(
                "option_conflict",
                option="--load-format dummy",
                other="a quantized config",
                reason="only unquantized weights can be made up",
                hint="Use the original model's config.json.",
            )
        weights = DummyWeights(config.dtype, config.device, config.seed)
    else:
        weights = open_weights(config)
    model = importlib.import_module(native).build(config.hf, weights)
    if isinstance(weights, CheckpointWeights) and (unused := weights.unused()):
        shown = ", ".join(unused[:3]) + (f" and {len(unused) - 3} more" if len(unused) > 3 else "")
        raise error(
            "tensor_mismatch", path=config.model, reason=f"it holds tensors the model has no place for: {shown}"
        )
    return model, describe_kinds(weights.kinds)


def open_weights(config: EngineConfig) -> CheckpointWeights:
    """The checkpoint of ``config`` as a source of weights, with the implementations that memory allows."""
    checkpoint = Checkpoint.open(config.model)
    excluded = frozenset() if _may_dequantize(config, checkpoint) else frozenset({"dequantized"})
    return CheckpointWeights(checkpoint, config.dtype, config.device, excluded)


def _may_dequantize(config: EngineConfig, checkpoint: Checkpoint) -> bool:
    if config.dequantize != "auto" or config.spec is None:
        return config.dequantize != "never"
    packed = sum(
        checkpoint.inventory[name].nbytes
        for prefix in checkpoint.quantized_linears()
        for suffix in ("qweight", "weight_packed", "weight")
        if (name := f"{prefix}.{suffix}") in checkpoint.inventory
    )
    expanded = packed * 8 / config.spec.bits * config.dtype.itemsize
    return expanded < 0.25 * free_memory(config.device)


def describe_kinds(kinds: Counter[tuple[str, str, tuple[tuple[str, str], ...]]]) -> str:
    """One line like ``42 x w4a16: dequantized; 1 x w16: torch``, with the reasons why nothing better was taken."""
    parts = []
    for (scheme, name, passed_over), count in sorted(kinds.items(), key=lambda item: -item[1]):
        reasons = "".join(f" ({other}: {reason})" for other, reason in passed_over)
        parts.append(f"{count} x {scheme}: {name}{reasons}")
    return "; ".join(parts)


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated: of the GPU, or of RAM within the container's limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit, used = _lines("/sys/fs/cgroup/memory.max"), _lines("/sys/fs/cgroup/memory.current")
    if limit and used and limit[0] != "max":
        available = min(available, int(limit[0]) - int(used[0]))
    return max(available, 0)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def kv_bytes_per_page(model: Model, page_size: int, dtype: torch.dtype) -> int:
    """Bytes of keys and values of one page, over all layers."""
    layers, kv_heads, head_dim = model.kv_shape
    return 2 * layers * page_size * kv_heads * head_dim * dtype.itemsize


def _count_pages(config: EngineConfig, model: Model) -> int:
    """Pages for as many full-length sequences as may run, within the memory that is left; scratch page included.

    Raises ``no_memory`` when not even one sequence of max_model_len tokens fits.
    """
    if config.num_pages is not None:
        return config.num_pages
    per_sequence = -(-config.max_model_len // config.page_size)
    wanted = config.max_num_seqs * per_sequence + 1
    page_bytes = kv_bytes_per_page(model, config.page_size, config.dtype)
    free = free_memory(config.device)
    # The weights are loaded already: the fraction applies to what is left, less room for one step's activations.
    activations = config.max_num_batched_tokens * config.hf.intermediate_size * 16 + config.max_num_seqs * (
        config.hf.vocab_size * 12
    )
    fitting = int((free * config.memory_fraction - activations) // page_bytes)
    if fitting < per_sequence + 1:
        raise error(
            "no_memory",
            available=f"{free / 2**30:.1f} GiB",
            needed=f"{(per_sequence + 1) * page_bytes / 2**30:.1f} GiB",
            max_model_len=config.max_model_len,
            fits=max(0, (fitting - 1) * config.page_size),
        )
    return min(wanted, fitting)


def load_engine(config: EngineConfig, on_phase: OnPhase) -> Engine:
    """Load the model, size the page pool and put the engine together, reporting each phase."""
    started = time.monotonic()
    model, kernels = load_model(config)
    gc.collect()
    method = f"{config.spec.method}, {config.spec.describe()}" if config.spec else "not quantized"
    on_phase(Phase("weights", time.monotonic() - started, f"{config.hf.architecture}, {method}"))
    started = time.monotonic()
    num_pages = _count_pages(config, model)
    runner = Runner(model, num_pages, config.page_size, config.dtype, config.device)
    pool = PagePool(num_pages, config.page_size, config.prefix_caching)
    scheduler = Scheduler(pool, config.max_num_seqs, config.max_num_batched_tokens, config.chunked_prefill)
    tokens = pool.num_usable * config.page_size
    size = num_pages * kv_bytes_per_page(model, config.page_size, config.dtype)
    pages = f"{pool.num_usable} of {config.page_size} tokens = {tokens} tokens, {size / 2**20:.0f} MiB"
    on_phase(Phase("KV pages", time.monotonic() - started, pages))
    limits = ModelLimits(
        vocab_size=model.vocab_size,
        max_model_len=config.max_model_len,
        max_kv_tokens=tokens,
        max_logprobs=config.max_logprobs,
        eos_token_ids=config.eos_token_ids,
    )
    dtype = str(config.dtype).removeprefix("torch.")
    facts = {
        "model": f"{config.hf.architecture}, {method}",
        "device": device_name(config.device),
        "dtype": f"{dtype} ({config.dtype_reason})",
        "linear layers": kernels,
        "attention": "torch reference over pages",
        "KV pages": pages,
        "batch": f"up to {config.max_num_seqs} sequences, {config.max_num_batched_tokens} tokens a step",
    }
    return Engine(runner, scheduler, limits, facts)


def device_name(device: torch.device) -> str:
    """The device in words, with threads for a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {torch.get_num_threads()} threads"


@dataclass
class ScoringModel:
    """A model for evaluation: logits of whole windows at once, through the runtime's own kernels and paged cache."""

    model: Model
    config: EngineConfig

    @torch.inference_mode()
    def logits(self, ids: Tensor) -> Tensor:
        """ids [B, T] int64 -> logits [B, T, V] float32; every row starts a sequence of its own."""
        B, T = ids.shape
        P = self.config.page_size
        per_sequence = -(-T // P)
        device = self.config.device
        runner = Runner(self.model, 1 + B * per_sequence, P, self.config.dtype, device)
        table = torch.arange(1, 1 + B * per_sequence, dtype=torch.int32, device=device).view(B, per_sequence)
        positions = torch.arange(T, device=device).repeat(B)
        slots = (table.long().repeat_interleave(P, dim=1) * P)[:, :T] + (torch.arange(T, device=device) % P)
        padding = -(B * T) % ROW_MULTIPLE
        pad = torch.nn.functional.pad
        context = AttentionContext(
            query_start=torch.arange(0, B * T + 1, T, dtype=torch.int32, device=device),
            kv_len=torch.full((B,), T, dtype=torch.int32, device=device),
            slots=pad(slots.flatten(), (0, padding)),
            page_table=table,
            num_decodes=0,
            query_start_list=list(range(0, B * T + 1, T)),
            kv_len_list=[T] * B,
        )
        step = ModelInput(
            pad(ids.to(device).flatten(), (0, padding)),
            pad(positions, (0, padding)),
            context,
            torch.arange(B * T, device=device),
        )
        return self.model.forward(step, runner.caches).view(B, T, -1)


def load_for_scoring(path: str | Path, dtype: str = "float32", device: str = "auto") -> ScoringModel:
    """Load a checkpoint, quantized or not, to compute the logits of whole texts (perplexity, KL)."""
    config = EngineConfig.from_args({"model": str(path), "dtype": dtype, "device": device})
    model, _ = load_model(config)
    return ScoringModel(model, config)
