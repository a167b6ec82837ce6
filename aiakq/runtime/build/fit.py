"""``aiakq inspect --fit``: whether a model fits a machine, and how many tokens, from headers alone.

Weights are those that ``memory_check`` compares with free memory before loading, and the KV cache is sized by the rule
of the engine (``kv_cache.memory_for_pages``), with its defaults.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from aiakq.errors import AiakqError, error
from aiakq.formats.checkpoint import Checkpoint
from aiakq.kernels.ops import PlannedOps
from aiakq.runtime.build.machines import Machine, machine
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.device_memory import free_memory
from aiakq.runtime.executor.kv_cache import kv_bytes_per_page, memory_for_pages
from aiakq.runtime.loader.memory_check import weight_bytes
from aiakq.runtime.loader.opening import open_weights
from aiakq.runtime.loader.required import build_without_weights
from aiakq.runtime.loader.rounding import RoundingAtLoad
from aiakq.runtime.models import is_native
from aiakq.spec import QuantSpec

#: Name -> bits of a weight with its part of scales of 16 bits: a scale per row, or for every 128 inputs.
_SCHEMES = {"int8": 8.0, "fp8": 8.0, "W4 (awq, gptq)": 4 + 16 / 128, "W3 (gptq)": 3 + 16 / 128}


@dataclass(frozen=True)
class Fit:
    """One way to store the model.

    scheme       as it is, or a method of aiakq.
    weights      bytes.
    tokens       tokens of KV cache that fit, after the activations of a step; 0 if none.
    context      longest sequence that fits, at most that of the model.
    sequences    how many sequences of ``wanted`` tokens fit at a time.
    fits         whether one does.
    """

    scheme: str
    weights: int
    tokens: int
    context: int
    sequences: int
    fits: bool


@dataclass(frozen=True)
class FitReport:
    """Whether a model fits a machine.

    wanted  tokens that a sequence must be able to have.
    """

    machine: Machine
    utilization: float
    kv_bytes_per_token: float
    wanted: int
    rows: tuple[Fit, ...]

    @property
    def fits(self) -> bool:
        """Whether the model fits as it is."""
        return self.rows[0].fits

    def document(self) -> dict[str, Any]:
        """Return all of it as JSON values."""
        return {**asdict(self), "fits": self.fits}


def fit(
    model: str,
    word: str,
    wanted: int | None = None,
    revision: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
) -> FitReport:
    """Return how the model ``model`` fits the machine that ``word`` names; headers are read only.

    wanted  tokens that a sequence must be able to have; the model's context if None.

    Raises ``bad_option``, what opening the model raises, and ``unsupported`` for one without a native implementation.
    """
    checkpoint = Checkpoint.fetch(model, revision)
    config = EngineConfig.from_args({"model": str(checkpoint.path), "device": device, "dtype": dtype})
    found = machine(word, free_memory(config.device.device))
    if wanted is not None and wanted > config.max_model_len:
        expected = f"at most {config.max_model_len}, the context of the model"
        raise error("bad_option", option="--fit-context", value=wanted, expected=expected, hint="")
    if not is_native(config.architecture):
        raise error("unsupported", what=f"--fit for {config.architecture}, which has no native model,", hint="")
    ops = PlannedOps(open_weights(config).ops)
    _, built = build_without_weights(config.model, checkpoint, ops)
    if built is None:
        raise error("unsupported", what=f"--fit for {config.architecture}, whose tensors are incomplete,", hint="")
    page = kv_bytes_per_page(built, config.cache)
    wanted = wanted or config.max_model_len
    rows = []
    for scheme, weights in {"as it is": weight_bytes(config), **_rounded(checkpoint, config)}.items():
        room = memory_for_pages(config, built, max(found.nbytes - weights, 0))
        # One page is scratch.
        pages = max(int(room // page) - 1, 0) if page else 0
        tokens = pages * config.cache.block_size
        needed = -(-wanted // config.cache.block_size)
        enough = room >= 0 and (pages >= needed if page else True)
        sequences = min(pages // needed, config.scheduler.max_num_seqs) if page else config.scheduler.max_num_seqs
        context = min(tokens, config.max_model_len) if page else config.max_model_len
        rows.append(Fit(scheme, weights, tokens, context if room >= 0 else 0, sequences if enough else 0, enough))
    checkpoint.close()
    per_token = page / config.cache.block_size
    return FitReport(found, config.cache.gpu_memory_utilization, per_token, wanted, tuple(rows))


def _rounded(checkpoint: Checkpoint, config: EngineConfig) -> dict[str, int]:
    """Return the bytes of the weights in every scheme, if the checkpoint is not quantized and its layers are [N, K]."""
    if config.spec is not None:
        return {}
    spec = QuantSpec("weight_only_int8", "compressed-tensors", 8)
    try:
        counts = RoundingAtLoad(checkpoint, spec).weights()
    except AiakqError:
        return {}
    width = config.device.dtype.itemsize
    plain = replace(config, load=replace(config.load, rounds=False))
    whole = weight_bytes(plain)
    stored = sum(min(checkpoint.inventory[name].nbytes, count * width) for name, count in counts.items())
    rows = sum(checkpoint.inventory[name].shape[0] for name in counts)
    found = {}
    for scheme, bits in _SCHEMES.items():
        scales = 2 * rows if bits == 8 else 0
        found[scheme] = whole - stored + int(sum(counts.values()) * bits / 8) + scales
    return found
