"""What is prepared while a model loads."""

from __future__ import annotations

import pytest

from aiakq.errors import AiakqError
from aiakq.server.loading import read_chat_template


def test_chat_template_is_a_file_or_the_text(tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages }}")
    assert read_chat_template(None) is None
    assert read_chat_template(str(file)) == "{{ messages }}"
    assert read_chat_template("{% if x %}y{% endif %}") == "{% if x %}y{% endif %}"
    with pytest.raises(AiakqError, match="readable file"):
        read_chat_template(str(tmp_path))
