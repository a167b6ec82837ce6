"""What the processes of a server import when they start."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["aiakq.server.launch", "aiakq.server.process.text_process"])
def test_starting_imports_nothing_that_few_requests_need(module):
    """Each of these takes time at every start, and memory in every process."""
    late = ["torch", "regex", *(["urllib.request", "ssl"] if module.endswith("text_process") else [])]
    code = f"import sys, {module}; print(*[name for name in {late} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert not done.stdout.split()
