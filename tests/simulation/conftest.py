"""Make the simulator's modules importable by their names, as when it runs as a program."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
