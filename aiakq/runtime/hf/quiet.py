"""transformers without its reports about tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def without_load_report() -> Iterator[None]:
    """Silence transformers' report of missing and unexpected tensors, which would list those that are left out."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


@contextlib.contextmanager
def without_progress() -> Iterator[None]:
    """Silence transformers' progress bar and reports of tensors."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with without_load_report():
            yield
    finally:
        if shown:
            logging.enable_progress_bar()
