"""What a quantized model inherits from its source."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from aiakq.quantizers.prepared import Prepared


def test_named_chat_templates_are_copied(tmp_path):
    names = ["additional_chat_templates/rag.jinja", "additional_chat_templates/tool_use.jinja", "chat_template.jinja"]
    for name in [*names, "additional_chat_templates/notes.txt"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{{ messages }}")
    source: Any = SimpleNamespace(source=tmp_path, options=SimpleNamespace(trust_remote_code=False))
    assert sorted(Prepared.verbatim_files(source)) == names
