"""``python -m aiakq`` is ``aiakq``."""

from aiakq.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
