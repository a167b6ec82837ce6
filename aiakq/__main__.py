"""Entry point of ``python -m aiakq``, the same as ``aiakq``."""

from aiakq.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
