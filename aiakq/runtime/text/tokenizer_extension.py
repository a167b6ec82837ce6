"""A tokenizer that a Python file of the operator creates (--tokenizer-extension-path)."""

from __future__ import annotations

import importlib.util

from aiakq.errors import error, first_line


def extended_tokenizer(path: str, folder: str) -> object:
    """Return the tokenizer created by the operator's Python file. Raises ``tokenizer_extension``."""
    spec = importlib.util.spec_from_file_location("aiakq_tokenizer_extension", path)
    if spec is None or spec.loader is None:
        raise error("tokenizer_extension", path=path, reason="it is not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        made = module.get_tokenizer(folder)
    except Exception as failure:
        reason = first_line(f"{type(failure).__name__}: {failure}")
        raise error("tokenizer_extension", path=path, reason=reason) from failure
    lacking = [name for name in ("encode", "decode") if not callable(getattr(made, name, None))]
    if lacking:
        raise error(
            "tokenizer_extension", path=path, reason=f"the object that get_tokenizer returns has no {lacking[0]}"
        )
    return made
