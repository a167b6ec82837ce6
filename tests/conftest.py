"""Shared fixtures. Tests reach helpers through them: under importlib mode the tests folder is not importable."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import lanes
import process_failures
import random_examples
from tiny_further_models import SPREADS
from tiny_models import PLAIN_NORMS, TINY

try:
    from aiakq.system.memory import freeze_objects
    from aiakq.system.threads import available_threads, spin_briefly
except ModuleNotFoundError as failure:
    raise pytest.UsageError("aiakq is not installed: run pip install -e '.[test]' first (see README)") from failure

# gptqmodel divides a pool of CPU workers and cannot divide one; and tests never reach for a network.
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
os.environ["HF_HUB_OFFLINE"] = "1"
# Tables have the width for a pipe, whatever terminal the tests are started from.
os.environ.pop("COLUMNS", None)
# Triton asks this when it is imported, and other packages import it while their tests are collected. With KERNEL_PTX,
# kernels are compiled instead, and tests/ptx executes what they are compiled to.
if not torch.cuda.is_available() and "KERNEL_PTX" not in os.environ:
    os.environ["TRITON_INTERPRET"] = "1"
spin_briefly()
# Workers of xdist share the processors: with more threads than processors, most of the time would go to waiting.
# Tests that depend on the number of threads set it, and a run without workers uses all processors.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    share = max(1, available_threads() // int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))
    os.environ["OMP_NUM_THREADS"] = str(share)
    torch.set_num_threads(share)
# A shell starts background jobs with SIGINT ignored, and the programs under test would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parent.parent


def pytest_configure(config: pytest.Config) -> None:
    """Choose the examples of hypothesis, and fail tests whose processes fail unnoticed."""
    random_examples.load_profile(config.getoption("--fuzz"))
    config.pluginmanager.register(process_failures, "process_failures")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options that choose a part of the tests; see lanes.py."""
    group = parser.getgroup("aiakq")
    group.addoption(
        "--lane",
        choices=[*lanes.LANES, *lanes.LANES_OF_CI],
        help="run a part of the tests; rest: what quick leaves out; ci: quick and the shard of the rest",
    )
    group.addoption("--shard", metavar="I/N", help="run the I-th of N parts of the tests")
    group.addoption(
        "--fuzz", metavar="N", type=int, help="draw N times as many examples of hypothesis, from a random seed"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that are not in the lane or the shard."""
    slow = {item.nodeid for item in items if item.get_closest_marker("slow")}
    names = [item.nodeid for item in items]
    try:
        kept = lanes.selected(names, slow, config.getoption("--lane"), config.getoption("--shard"))
    except ValueError as failure:
        raise pytest.UsageError(str(failure)) from failure
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
    items[:] = [item for item in items if item.nodeid in kept]


_frozen = 0  # modules


@pytest.fixture(autouse=True)
def frozen_modules() -> None:
    """Exclude imported modules from garbage collection, half of the time of loading a tiny model otherwise."""
    global _frozen
    if len(sys.modules) > _frozen + 50:
        freeze_objects()
        _frozen = len(sys.modules)


@pytest.fixture(scope="session")
def example_model() -> Path:
    """The trained example model, 5.8 M parameters."""
    return ROOT / "examples" / "tinybooks"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A Ray cluster of three nodes: this process's with one processor, one with two, and one with one."""
    ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'aiakq[ray]'")
    from ray._common.utils import get_default_ray_temp_dir
    from ray.cluster_utils import Cluster

    from aiakq.runtime.distributed import ray_cluster

    ray_cluster.import_ray()  # its settings
    # Ray notes the last cluster's address here, and creates the folder only where no other one is given for its files.
    Path(get_default_ray_temp_dir()).mkdir(parents=True, exist_ok=True)
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # paths of sockets are short
    head = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 80 << 20, "temp_dir": folder}
    made = Cluster(initialize_head=True, head_node_args=head)
    for cpus in (2, 1):
        made.add_node(num_cpus=cpus, object_store_memory=80 << 20)
    yield made
    ray.shutdown()
    made.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def heldout_text() -> str:
    """Text of a book the example model never saw."""
    return (ROOT / "examples" / "heldout.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Callable[..., Path]:
    """``tiny_model(architecture, **config)`` -> folder of a small random model, made once per session."""
    made: dict[tuple, Path] = {}

    def make(architecture: str, **changes: Any) -> Path:
        if architecture not in TINY:  # a family of an installed package
            pytest.skip(f"TINY in tests/conftest.py has no config for {architecture}")
        key = (architecture, tuple(sorted((name, repr(value)) for name, value in changes.items())))
        if key not in made:
            made[key] = _save_tiny(architecture, changes, tmp_path_factory.mktemp(architecture))
        return made[key]

    return make


def _save_tiny(architecture: str, changes: dict[str, Any], folder: Path) -> Path:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from aiakq.runtime.hf.mimo import register_mimo

    register_mimo()
    kind, numbers = TINY[architecture]
    config = AutoConfig.for_model(kind, **{**numbers, **changes})
    torch.manual_seed(0)
    model, spread = AutoModelForCausalLM.from_config(config, dtype=torch.float32), SPREADS.get(architecture, 1.5)
    # Weights as spread as trained ones are: the library's own are so small that every logit is nearly equal.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0.0, spread / parameter.shape[-1] ** 0.5)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.1)
            elif architecture not in PLAIN_NORMS:
                parameter.add_(torch.randn(parameter.shape) * 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.normal_(0.0, 0.1)
            elif name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    _byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_classifier(tiny_model, tmp_path_factory) -> Callable[..., Path]:
    """``tiny_classifier(architecture, labels, **config)`` -> folder of a small random model that classifies."""
    made: dict[tuple, Path] = {}

    def make(architecture: str, labels: int, **changes: Any) -> Path:
        from transformers import AutoModelForSequenceClassification

        key = (architecture, labels, repr(sorted(changes.items())))
        if key not in made:
            torch.manual_seed(1)
            source, made[key] = tiny_model(architecture), tmp_path_factory.mktemp(architecture)
            model = AutoModelForSequenceClassification.from_pretrained(
                source, dtype=torch.float32, num_labels=labels, **changes
            )
            with torch.no_grad():
                model.score.weight.normal_(0.0, 1.5 / model.score.in_features**0.5)
            model.save_pretrained(made[key])
            _byte_tokenizer().save_pretrained(made[key])
        return made[key]

    return make


@pytest.fixture(scope="session")
def byte_tokenizer() -> Any:
    """The tokenizer of the tiny models, as transformers loads it: single bytes and three special tokens."""
    return _byte_tokenizer()


@pytest.fixture(scope="session")
def tiny_whisper(tmp_path_factory) -> Path:
    """The folder of a small random Whisper."""
    from speech_models import save_whisper

    return save_whisper(tmp_path_factory.mktemp("whisper"), _byte_tokenizer())


def _byte_tokenizer() -> Any:
    """A tokenizer of single bytes with three special tokens, which needs no file."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<s>", "</s>", "<pad>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
    )


class Ended(NamedTuple):
    """How a command ended. ``last`` is the last line of its stderr."""

    code: int
    out: str
    err: str

    @property
    def last(self) -> str:
        return self.err.rstrip("\n").rpartition("\n")[2]


@pytest.fixture
def aiakq(capsys) -> Callable[..., Ended]:
    """``aiakq(*words)`` runs the command line in this process."""

    def run(*words: str) -> Ended:
        from aiakq.cli import main

        code = main([str(word) for word in words])
        return Ended(code, *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def program() -> Path:
    """The installed command."""
    return Path(sys.executable).with_name("aiakq")


@pytest.fixture
def process(program, tmp_path) -> Callable[..., Ended]:
    """``process(*words, **environment)`` runs the installed command in a process of its own, in an empty folder."""

    def run(*words: str, **environment: str) -> Ended:
        variables: dict[str, Any] = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        done = subprocess.run(
            [str(program), *map(str, words)], capture_output=True, text=True, cwd=tmp_path, env=variables, timeout=120
        )
        return Ended(done.returncode, done.stdout, done.stderr)

    return run
