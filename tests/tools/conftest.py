"""torchwheels from the source tree."""

from __future__ import annotations

import sys

from extops_build import ROOT

sys.path.append(str(ROOT / "torchwheels" / "src"))
