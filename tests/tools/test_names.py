"""Names that the sources use in one place only."""

from __future__ import annotations

from extops_build import ROOT


def test_torchs_inner_namespace() -> None:
    """What torch's headers may rename is named once: the wheel is compiled with headers that are pinned."""
    counts = {
        path.name: count
        for path in (ROOT / "csrc").rglob("*.*")
        if (count := path.read_text().count("stable::detail"))
    }
    assert counts == {"tensor.h": 2}
