"""A test passes only if its processes do not fail, or if it says that they do (process_failures.py)."""

import os
import subprocess
import sys
from pathlib import Path

CODE = """
import pytest

from aiakq.system.child import Child, child_command


def fail():
    # There is no such socket: the traceback is of child.py.
    child = Child(child_command("from aiakq.system.child import parent_socket; parent_socket(9)"))
    child.process.wait()
    child.close()


def test_unnoticed():
    fail()


def test_unnoticed_where_output_is_read(capfd):
    fail()
    capfd.readouterr()


@pytest.fixture
def failing():
    yield
    fail()


def test_unnoticed_in_the_end(failing):
    pass


def test_replaced_process():
    import logging

    logging.getLogger("aiakq.server").warning("The tokenizer's process is replaced: it ended with exit code 1")


def test_traceback_of_other_code():
    Child(child_command("1 / 0")).process.wait()


@pytest.mark.process_failures
def test_about_it():
    fail()
"""


def test_tests_whose_processes_fail_unnoticed_fail(tmp_path):
    file = tmp_path / "test_some.py"
    file.write_text(CODE)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "process_failures",
        "-p",
        "no:cacheprovider",
        "-q",
        "-rA",
        str(file),
    ]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    ended = {
        line.split(" - ")[0] for line in done.stdout.splitlines() if line.startswith(("FAILED", "PASSED", "ERROR"))
    }
    assert ended == {
        "FAILED test_some.py::test_unnoticed",
        "FAILED test_some.py::test_unnoticed_where_output_is_read",
        "PASSED test_some.py::test_unnoticed_in_the_end",
        "ERROR test_some.py::test_unnoticed_in_the_end",
        "FAILED test_some.py::test_replaced_process",
        "PASSED test_some.py::test_about_it",
        "PASSED test_some.py::test_traceback_of_other_code",
    }, done.stdout
