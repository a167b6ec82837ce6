"""Mutate sound models of every format, load each one and compute logits: refused in one line, or with sound values.

    python tests/hostile_models/mutated.py [--cases 5000] [--seed 0] [--only WORDS] [--first 0] [--show]

Case N of a seed is always the same one. A case may end in an error of the registry whose message is one line, or load.
It may not end in another exception, a signal, a hang (--seconds) or more than MEMORY bytes; and where a mutation only
changes what describes the data, a model that loads has the logits of before. Models with other logits, by their
config or data, are listed with --show. Cases run in a forked process, which is replaced if it dies.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

import torch  # noqa: E402
from mutations import STRUCTURE, Folder, mutated  # noqa: E402
from sources import sources  # noqa: E402

from aiakq.errors import AiakqError, memory_error  # noqa: E402

#: Bytes of memory that cases may take beyond what imported modules take.
MEMORY = 1 << 30
#: Outcomes that no case may have.
BROKEN = ("exception", "several lines", "signal", "hang", "other values")
IDS = torch.arange(3, 11).reshape(1, -1)


@dataclass
class Source:
    """A sound model: its files, and its logits."""

    name: str
    files: Folder
    logits: torch.Tensor


@dataclass
class Result:
    """How a case ended: refused, same, changed, or one of BROKEN."""

    number: int
    source: str
    mutation: str
    outcome: str
    line: str = ""


def model_in(folder: Path) -> Path:
    """Return what a user would call the model in a folder."""
    return next(folder.glob("*.gguf"), folder)


def logits_of(folder: Path) -> torch.Tensor:
    """Return the logits [T, V] of a few tokens, or raise whatever loading raises."""
    from aiakq.evaluation.scoring import load_for_scoring

    model = load_for_scoring(model_in(folder), "float32", "cpu")
    return model.logits(IDS[:, : model.config.max_model_len])[0]


def sound_models(workplace: Path, only: str) -> list[Source]:
    """Write every source whose name has the words ``only`` and load it."""
    found = []
    for name, write in sources().items():
        if only not in name:
            continue
        folder = workplace / "sound"
        write(folder)
        logits = logits_of(folder)
        files = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
        found.append(Source(name, files, logits))
        shutil.rmtree(folder)
    return found


def case_of(number: int, seed: int, models: list[Source]) -> tuple[Source, Folder, str, str]:
    """Return the model of a case, its mutated files, what was changed, and the kind of mutation."""
    rng = random.Random(f"{seed} {number}")
    source = models[number % len(models)]
    return (source, *mutated(source.files, rng))


def run_case(number: int, seed: int, models: list[Source], workplace: Path) -> Result:
    """Write a case, load it, and judge what happened."""
    source, files, what, kind = case_of(number, seed, models)
    folder = workplace / "model"
    shutil.rmtree(workplace / "cache", ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    result = Result(number, source.name, what, "same")
    try:
        if number % 4 == 0:
            from aiakq.runtime.inspect.inspection import inspect_checkpoint

            inspect_checkpoint(str(model_in(folder)), device="cpu")
        logits = logits_of(folder)
    except AiakqError as problem:
        result.outcome, result.line = "refused", str(problem)
        if "\n" in result.line and problem.id != "tensor_inventory":  # which ends with a table
            result.outcome = "several lines"
    except Exception as problem:
        lacking = memory_error(problem)  # what the command line says, also where the config asks for so long a context
        result.outcome, result.line = "refused" if lacking else "exception", str(lacking or "")
        if lacking is None:
            result.line = f"{type(problem).__name__}: {problem!s:.200} {_where(problem)}"
    else:
        if logits.shape != source.logits.shape or not torch.equal(logits, source.logits):
            result.outcome = "other values" if kind == STRUCTURE else "changed"
            near = logits.shape == source.logits.shape and torch.allclose(logits, source.logits, rtol=1e-3, atol=1e-3)
            result.outcome = "same" if near and kind == STRUCTURE else result.outcome
    return result


def _where(problem: BaseException) -> str:
    frames = traceback.extract_tb(problem.__traceback__)[-5:]
    return " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames))


def run(numbers: range, seed: int, models: list[Source], workplace: Path, seconds: float) -> Iterator[Result]:
    """Run cases in forked processes, each of which goes on until it ends, dies or hangs."""
    waiting = numbers
    while waiting:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            _child(waiting, seed, models, workplace, writer, seconds)
        os.close(writer)
        done = 0
        with os.fdopen(reader) as stream:
            for line in stream:
                done += 1
                yield Result(**json.loads(line))
        _, status = os.waitpid(pid, 0)
        waiting = waiting[done:]
        if waiting:
            source, _, what, _ = case_of(waiting[0], seed, models)
            code = os.waitstatus_to_exitcode(status)
            outcome = "hang" if -code in (signal.SIGALRM, signal.SIGXCPU) else "signal"
            yield Result(waiting[0], source.name, what, outcome, f"the process ended with {code}")
            waiting = waiting[1:]


def _child(numbers: range, seed: int, models: list[Source], workplace: Path, writer: int, seconds: float) -> None:
    """Run cases and write each result as a line; never returns."""
    with open("/proc/self/statm") as stream:
        used = int(stream.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    try:
        for number in numbers:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            line = json.dumps(vars(run_case(number, seed, models, workplace))) + "\n"
            data = line.encode()
            while data:
                data = data[os.write(writer, data) :]
    finally:
        os._exit(0)


def fuzz(
    cases: int, seed: int = 0, only: str = "", first: int = 0, seconds: float = 60, report: Any = None
) -> list[Result]:
    """Run ``cases`` cases from number ``first`` on; ``report`` is called with each result."""
    torch.set_num_threads(1)
    results = []
    with tempfile.TemporaryDirectory() as name:
        workplace = Path(name)
        os.environ["XDG_CACHE_HOME"] = str(workplace / "cache")
        models = sound_models(workplace, only)
        for result in run(range(first, first + cases), seed, models, workplace, seconds):
            results.append(result)
            if report is not None:
                report(result)
    return results


def table(results: list[Result]) -> list[str]:
    """Return lines: how many cases of each source ended how."""
    counts: Mapping[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for result in results:
        counts[result.source][result.outcome] += 1
        counts["all"][result.outcome] += 1
    outcomes = ("refused", "same", "changed", *(each for each in BROKEN if counts["all"][each]))
    names = [*sorted(name for name in counts if name != "all"), "all"]
    lines = [f"{'model':28}" + "".join(f"{each:>15}" for each in outcomes)]
    return lines + [f"{name:28}" + "".join(f"{counts[name][each]:>15}" for each in outcomes) for name in names]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="models whose name has these words")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seconds", type=float, default=60, help="that a case may take")
    parser.add_argument("--show", action="store_true", help="print every result")
    args = parser.parse_args()
    began = time.monotonic()

    def report(result: Result) -> None:
        if args.show or result.outcome in BROKEN:
            print(f"{result.number} {result.source} [{result.mutation}] {result.outcome}: {result.line}", flush=True)

    results = fuzz(args.cases, args.seed, args.only, args.first, args.seconds, report)
    print("\n".join(table(results)))
    print(f"{time.monotonic() - began:.0f} s")
    return 1 if any(result.outcome in BROKEN for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
