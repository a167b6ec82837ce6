"""The tokenizer of a model that is quantized, as transformers loads it."""

from __future__ import annotations

from pathlib import Path

from aiakq.errors import AiakqError
from aiakq.formats.mistral.choice import has_only_mistral_tokenizer
from aiakq.formats.model_folder import check_files
from aiakq.runtime.text.mistral_tokenizer import MistralTokenizer
from aiakq.runtime.text.tokenizer import Tokenizer, is_panic
from aiakq.runtime.text.tokenizer_diagnosis import why_unreadable
from aiakq.runtime.text.tokenizer_files import has_tokenizer


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> object:
    """The folder's tokenizer as transformers loads it, or None if it has none. Raises ``model_malformed``."""
    import transformers

    check_files(folder)
    if not has_tokenizer(folder):
        return None
    if has_only_mistral_tokenizer(folder):
        return MistralTokenizer.of(folder).hf
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
        Tokenizer(tokenizer).check_growth()
        return tokenizer
    except AiakqError:
        raise
    except BaseException as problem:
        if not isinstance(problem, Exception) and not is_panic(problem):
            raise
        # Tokenizer code may raise anything; the model itself may still work with token ids.
        raise why_unreadable(folder, problem) from problem
