"""The simulator's modules are imported by their names, as they are when it is run as a program."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
