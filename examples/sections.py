"""Sections of a page in docs/ that several scripts write; each section is between two markers."""

from __future__ import annotations

import re
from pathlib import Path


def put(page: Path, name: str, text: str) -> None:
    """Replace the section ``name`` of a page, or add it at the end."""
    old = page.read_text(encoding="utf-8") if page.is_file() else ""
    new = f"<!-- {name}: begin -->\n{text.strip()}\n<!-- {name}: end -->"
    found = _find(name, old)
    page.write_text(old.replace(found, new) if found else f"{old.rstrip()}\n\n{new}\n", encoding="utf-8")


def get(page: Path, name: str) -> str:
    """The section ``name`` of a page with its markers, empty if there is none."""
    return _find(name, page.read_text(encoding="utf-8")) if page.is_file() else ""


def _find(name: str, text: str) -> str:
    found = re.search(rf"<!-- {name}: begin -->.*?<!-- {name}: end -->", text, re.DOTALL)
    return found[0] if found else ""
