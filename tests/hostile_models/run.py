"""Run aiakq on malicious checkpoints and tokenizers, each in its own process: each is refused in one line or harmless.

    python tests/hostile_models/run.py [--sample N] [--only WORDS] [--jobs 2] [--seconds 60]

A case may end in an entry of the error registry (its exit code, one line) or work. It may not end in a traceback, a
bug, a signal, a hang, memory beyond the limit; write a file outside its output, start a program or open a connection;
read a file outside the folder, or publish a byte of one. A table lists the results; the exit code is 1 if a check
failed. Processes are forked from one that imported everything, so that cases need no time for imports.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
os.environ |= {"HF_HUB_OFFLINE": "1", "RUST_BACKTRACE": "0", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

import quantized  # noqa: E402, F401  registers its families
import texts  # noqa: E402, F401
import weights  # noqa: E402, F401
from base import Case, cases, write_base  # noqa: E402

from aiakq.errors import BUG, REGISTRY, AiakqError  # noqa: E402

SECRET = b"a secret that must not be published " * 8
#: Bytes of memory that a case may take beyond what imported modules take.
MEMORY = 3 << 30
FILE_SIZE = 256 << 20
#: Lines that aiakq's errors may have after their sentence: a table of tensors.
MAX_LINES = 30
#: Whether accesses to memory are checked (``make sanitize``), for which all addresses are reserved.
SANITIZED = "libasan" in os.environ.get("LD_PRELOAD", "")
#: What sanitizers call what they find.
FINDINGS = ("AddressSanitizer", "runtime error:")
KNOWN_CODES = {0} | {kind.exit_code for kind in REGISTRY.values()} - {BUG}


# --- the commands, each in a process that ends with it ----------------------------------------------------------------


def inspect(folder: Path) -> int:
    from aiakq.cli import main

    return main(["inspect", str(folder), "--device", "cpu"])


def quantize(folder: Path, *words: str) -> int:
    from aiakq.cli import main

    output = folder.parent / "out"
    return main(
        [
            *("quantize", "-i", str(folder), "-o", str(output), "--device", "cpu", "--no-eval"),
            *(words or ("-quant_type", "weight_only_int8")),
        ]
    )


def chat(folder: Path) -> int:
    """Conversations through the model's own template, as calibration."""
    data = folder.parent / "chats.jsonl"
    data.write_text('{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}\n' * 4)
    words = ("-quant_type", "gptq", "--group-size", "32", "--samples", "2", "--seqlen", "16")
    return quantize(folder, *words, "--calibration", str(data))


def load(folder: Path, text: bool = False, adapter: bool = False, tokens: int = 2, **arguments: Any) -> int:
    """LLM: load, then some tokens; or encode and decode a text too, or with the adapter beside the model."""
    from aiakq import LLM, LoRARequest, SamplingParams

    def run() -> None:
        llm = LLM(model=str(folder), device="cpu", num_gpu_blocks_override=17, max_model_len=64, **arguments)
        prompt: Any = "Hi aaaaaaaaaaaaaaaaaaaaaaaaaaa there" if text else {"prompt_token_ids": [5, 6, 7]}
        request = LoRARequest("adapter", 1, str(folder / "adapter")) if adapter else None
        for params in (None, SamplingParams(temperature=0, max_tokens=tokens)):
            params = params or llm.get_default_sampling_params()
            llm.generate([prompt], params, use_tqdm=False, lora_request=request)

    return _as_the_command_line_does(run)


def head(folder: Path) -> int:
    """LLM with the EAGLE-3 head beside the model, in steps that cost the same with draft tokens and without."""
    from aiakq.runtime.speculation import step_costs
    from aiakq.runtime.speculation.draft_length import StepCosts

    step_costs.measure_step_costs = lambda *arguments: StepCosts({1: 1.0, 1000: 1.0})
    config = {"method": "eagle3", "model": str(folder / "head"), "num_speculative_tokens": 3}
    return load(folder, tokens=8, speculative_config=config)


def _as_the_command_line_does(run: Callable[[], None]) -> int:
    try:
        run()
    except AiakqError as problem:
        print(f"aiakq: error: {problem}", file=sys.stderr)
        return problem.exit_code
    except MemoryError:
        print("aiakq: error: out of memory", file=sys.stderr)
        return REGISTRY["out_of_memory"].exit_code
    return 0


COMMANDS: dict[str, Callable[[Path], int]] = {
    "inspect": inspect,
    "load": load,
    "quantize": quantize,
    "text": lambda folder: load(folder, text=True),
    "adapter": lambda folder: load(folder, adapter=True, enable_lora=True),
    "head": head,
    "chat": chat,
}


def watch(workplace: Path, broken: Callable[[str], None], templates: bool) -> None:
    """Report what no case may do: start a program, open a connection, write elsewhere, read elsewhere."""
    secret = str(workplace / "secret.bin")

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("os.system", "os.exec", "os.posix_spawn", "socket.connect", "pty.spawn"):
            broken(f"{event} {arguments!r:.100}")
        elif event == "subprocess.Popen" and not templates:
            broken(f"{event} {arguments!r:.100}")
        elif event == "open" and isinstance(arguments[0], str):
            path, flags = os.path.realpath(arguments[0]), arguments[2]
            writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if path == secret or (writes and not path.startswith((str(workplace), "/dev/", "/tmp/torchinductor"))):
                broken(f"open {arguments!r:.200}")

    sys.addaudithook(hook)


def child(case: Case, command: str, workplace: Path, seconds: float) -> None:
    """One command on one case; never returns."""
    os.chdir(workplace)
    os.setsid()
    for name, number in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(workplace / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    code = BUG
    try:
        with open("/proc/self/statm") as stream:
            used = int(stream.read().split()[0]) * resource.getpagesize()
        if not SANITIZED:
            resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds)))
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_SIZE, FILE_SIZE))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

        def broken(what: str) -> None:
            os.write(2, f"BROKEN: {what}\n".encode(errors="replace"))

        watch(workplace, broken, templates=command == "chat")
        code = COMMANDS[command](workplace / "model")
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


# --- the verdict ------------------------------------------------------------------------------------------------------


def verdict(case: Case, command: str, workplace: Path, status: int | None) -> tuple[str, str]:
    """(harmless, refused or broken; the last line, or what is broken)."""
    said = (workplace / "stderr").read_text(errors="replace")
    last = said.strip().splitlines()[-1] if said.strip() else ""
    found = [line for line in said.splitlines() if any(words in line for words in FINDINGS)]
    if found:
        return "broken", f"{found[0]:.300}"
    if status is None:
        return "broken", "it did not end in time"
    if status < 0:
        return "broken", f"signal {signal.Signals(-status).name}: {last:.200}"
    for line in said.splitlines():
        if line.startswith("BROKEN: "):
            return "broken", line
    if "Traceback" in said or status not in KNOWN_CODES:
        return "broken", f"exit code {status}: {last:.200}"
    if any(workplace.rglob("CANARY")):
        return "broken", "it ran code of the model"
    for path in [workplace / "stdout", workplace / "stderr", *workplace.glob("out/*")]:
        if path.is_file() and SECRET[:24] in path.read_bytes():
            return "broken", f"a file from outside the folder is in {path.name}"
    if status == 0:
        return "harmless", ""
    errors = [line for line in said.splitlines() if line.startswith("aiakq: error")]
    if len(errors) != 1 or len(said.splitlines()) > MAX_LINES:
        return "broken", f"exit code {status} with {len(said.splitlines())} lines: {last:.200}"
    if list(workplace.glob(".out*")) or (workplace / "out").exists():
        return "broken", "a partial output was left"
    return "refused", errors[0]


def start(case: Case, command: str, root: Path, seconds: float) -> tuple[int, Path, float]:
    """Fork a process for one command. Returns its id, its folder, and when to give up."""
    workplace = Path(tempfile.mkdtemp(dir=root))
    (workplace / "secret.bin").write_bytes(SECRET)
    for name in ("stdout", "stderr"):
        (workplace / name).touch()
    shutil.copytree(root / "base", workplace / "model")
    case.change(workplace / "model")
    pid = os.fork()
    if pid == 0:
        child(case, command, workplace, seconds)
    return pid, workplace, time.monotonic() + seconds


def run(chosen: list[Case], jobs: int, seconds: float) -> list[tuple[Case, str, str, str]]:
    """(case, command, verdict, line) of every command of every case."""
    found = []
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        write_base(root / "base")
        waiting = [(case, command) for case in chosen for command in case.commands]
        running: dict[int, tuple[Case, str, Path, float]] = {}
        while waiting or running:
            while waiting and len(running) < jobs:
                case, command = waiting.pop(0)
                pid, workplace, until = start(case, command, root, seconds)
                running[pid] = (case, command, workplace, until)
            time.sleep(0.02)
            for pid, (case, command, workplace, until) in list(running.items()):
                ended, status = os.waitpid(pid, os.WNOHANG)
                late = time.monotonic() > until
                if not ended and not late:
                    continue
                if not ended:
                    os.killpg(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                code = os.waitstatus_to_exitcode(status) if ended else None
                what, line = verdict(case, command, workplace, code)
                found.append((case, command, what, line))
                if what == "broken":
                    print(f"BROKEN {case.family} / {case.name} / {command}: {line}", flush=True)
                shutil.rmtree(workplace)
                del running[pid]
    return found


def preload() -> None:
    """Import what every command needs, so that forked processes have it."""
    import transformers
    import transformers.models.llama.modeling_llama

    _ = transformers.AutoTokenizer, transformers.AutoModelForCausalLM, transformers.CONFIG_MAPPING


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=0, help="about so many cases, spread over all families")
    parser.add_argument("--only", default="", help="cases whose family and name hold these words")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60, help="that a command may take")
    args = parser.parse_args()
    chosen = [case for case in cases() if args.only in f"{case.family} / {case.name}"]
    if args.sample:
        chosen = chosen[:: max(1, -(-len(chosen) // args.sample))]
    preload()
    began = time.monotonic()
    found = run(chosen, args.jobs, args.seconds)
    rows: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for case, _, what, _ in found:
        rows[case.family][what] += 1
    counts = collections.Counter(case.family for case in chosen)
    print(f"{'family':24}{'cases':>8}{'commands':>10}{'refused':>9}{'harmless':>10}{'broken':>8}")
    total = collections.Counter[str]()
    for name, row in rows.items():
        total.update(row)
        values = (counts[name], row.total(), row["refused"], row["harmless"], row["broken"])
        print(
            f"{name:24}" + "".join(f"{value:>{width}}" for value, width in zip(values, (8, 10, 9, 10, 8), strict=True))
        )
    values = (len(chosen), total.total(), total["refused"], total["harmless"], total["broken"])
    print(f"{'all':24}" + "".join(f"{value:>{width}}" for value, width in zip(values, (8, 10, 9, 10, 8), strict=True)))
    print(f"{time.monotonic() - began:.0f} s")
    return 1 if total["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
