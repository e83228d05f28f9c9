"""torchwheels from the source tree."""

from __future__ import annotations

import sys

from service import ROOT

sys.path.append(str(ROOT / "service"))
