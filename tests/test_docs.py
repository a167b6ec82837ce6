"""The documentation is true: generated pages are current, links lead somewhere, the structure page fits the tree."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
#: Pages that `make docs` may have built and that are not committed are not among them.
PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")} - {ROOT / "docs/cli.md", ROOT / "docs/modules.md"})


def _generator():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_format_is_in_the_table_of_formats():
    _generator()  # its folder is then on the path
    import format_page

    from aiakq.formats import FORMATS

    decoded = {name for name in FORMATS if f"`{name}`" in format_page._DECODED}
    assert {row.format for row in format_page.ROWS} | decoded == set(
        FORMATS.built_in if hasattr(FORMATS, "built_in") else FORMATS
    )


@pytest.mark.parametrize("name", _generator().COMMITTED)
def test_generated_pages_are_current(name):
    assert (ROOT / "docs" / name).read_text() == _generator().COMMITTED[name](), "run make docs"


@pytest.mark.parametrize(
    ("name", "needed"), [("modules.md", "`cli.py`"), ("cli.md", "## aiakq bench serve"), ("aiakq.1", ".SH")]
)
def test_pages_that_are_not_committed_are_built(name, needed):
    assert needed in _generator().BUILT[name]()


def test_the_manual_page_names_every_command_and_needs_no_package():
    words = [sys.executable, "-I", "-S", str(ROOT / "docs" / "manual.py"), "-"]
    page = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    for name in _generator().COMMAND_NAMES:
        help_of_command = _generator().help_text(name.split()).split("\n\n")[1]
        assert f"aiakq {name}".replace("-", "\\-") in page
        assert " ".join(help_of_command.split())[:40].replace("-", "\\-") in page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_in_the_docs_point_to_existing_files(page):
    for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_commands_in_the_readme_exist():
    text = (ROOT / "README.md").read_text()
    targets = set(re.findall(r"^make (\w+)", text, re.MULTILINE))
    known = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert targets and targets <= known
    commands = set(re.findall(r"^(?:\$ )?aiakq ([\w-]+)", text, re.MULTILINE))
    assert commands <= {
        "quantize",
        "convert",
        "serve",
        "chat",
        "bench",
        "eval",
        "inspect",
        "compare",
        "translate",
        "collect-env",
        "completion",
    }


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/decisions/*.md")), ids=lambda page: page.stem)
def test_decisions_are_short_and_whole(page):
    text = page.read_text()
    assert len(text.splitlines()) <= 20
    for part in ("Context", "Decision", "Consequences", "Revisit when"):
        assert f"**{part}**" in text


def test_paths_in_the_structure_page_exist():
    text = (ROOT / "docs" / "structure.md").read_text()
    paths = re.findall(r"`([\w/]+(?:\.py|\.cpp|/))`", text)
    assert len(paths) > 30
    for path in paths:
        assert (ROOT / path).exists() or (ROOT / "aiakq" / path).exists(), path


def test_every_curl_command_that_sends_json_has_its_content_type():
    """Without a Content-Type, curl sends that of a form, which the server refuses."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]
    commands = []
    for page in pages:
        text = page.read_text().replace("\\\n", " ")
        lines = re.findall(r"\bcurl\b[^\n`]*", text)
        commands += [(page.name, line) for line in lines if re.search(r" (-d|--data\S*) ", line)]
    assert commands
    for name, line in commands:
        assert re.search(r"content-type: application/json", line, re.IGNORECASE), (name, line)
