"""Environment variables that are not options, and the detection of misspelled ones. Standard library only."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from aiakq.arguments.argument import PREFIX
from aiakq.arguments.commands import COMMANDS, CONFIG

#: Variables that do not correspond to an option -> what they do.
SETTINGS = {
    "AIAKQ_API_KEY": "API keys that `aiakq serve` accepts, separated by commas, in addition to `--api-key` and "
    "`--api-key-file`; the key that `aiakq bench serve` and `aiakq chat` send.",
    "AIAKQ_DEBUG": "If not empty: show tracebacks, as `--debug` does.",
    "AIAKQ_KERNELS": "Names of the kernel implementations to enable, separated by commas; all if not set.",
    "AIAKQ_CPU_ISA": "Instruction set of the native CPU kernels: vnni_bf16, vnni, avx512, avx2 or portable.",
    "AIAKQ_RAY_CPUS_PER_RANK": "Number of processors that each rank reserves from Ray and uses; if not set, those of "
    "rank 0's node divided by `-tp`, or fewer if the cluster has fewer.",
    "AIAKQ_RAY_PLACEMENT_GROUP": "Id of the Ray placement group for the ranks, if the engine is not started inside it: "
    "one bundle per rank, the first for rank 0.",
    "AIAKQ_REQUIRE_NATIVE": "If not empty during installation or build: fail if the native CPU kernels cannot be "
    "compiled.",
    "AIAKQ_CPU_LIBRARY": "Path of a native CPU library to use instead of the installed one.",
}
#: Variables that Kubernetes sets in pods for a service whose name starts with ``aiakq``.
_KUBERNETES = re.compile(r"_SERVICE_(HOST|PORT)(_|$)|_PORT(_\d+_(TCP|UDP|SCTP)(_PROTO|_PORT|_ADDR)?)?$")


def known_variables() -> set[str]:
    """Return all variables that any command reads."""
    rows = (CONFIG, *(row for command in COMMANDS.values() for row in command.rows))
    return {name for row in rows for name in row.variables} | SETTINGS.keys()


def unknown_variables(names: Iterable[str]) -> list[str]:
    """Return one sentence about each of ``names`` that starts with ``AIAKQ_`` but that no command reads."""
    known = known_variables()
    sentences = []
    for name in sorted(names):
        if not name.startswith(PREFIX) or name in known or _KUBERNETES.search(name):
            continue
        words = [variable.removeprefix(PREFIX) for variable in known]
        close = difflib.get_close_matches(name.removeprefix(PREFIX), words, n=1, cutoff=0.7)
        hint = (
            f"Did you mean {PREFIX}{close[0]}?" if close else "Variables are named after the options that --help lists."
        )
        sentences.append(f"No option or setting reads the environment variable {name}. {hint}")
    return sentences
