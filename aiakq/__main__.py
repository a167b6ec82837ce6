"""Entry point of ``python -m aiakq``, the same as ``aiakq``."""

import sys

import aiakq


def _shadowed() -> str | None:
    """Return the folder that Python takes for this package: one called aiakq in the working folder, like a clone."""
    return None if getattr(aiakq, "__file__", None) else next(iter(aiakq.__path__))


if __name__ == "__main__":
    if folder := _shadowed():
        sys.stderr.write(
            f"error: Python takes the folder {folder} for the package aiakq. Change to another folder, or run the "
            "command aiakq instead of python -m aiakq.\n"
        )
        raise SystemExit(2)
    from aiakq.cli import main

    raise SystemExit(main())
