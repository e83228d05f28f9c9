"""The files that name a cell of the package, which `python -m tools.cells` writes."""

from extops_build import ROOT
from tools import cells


def test_files_are_as_written() -> None:
    found = cells.files()
    without = [cell for cell, name in cells.cells().items() if not cells.has_sequence_kernels(name)]
    assert len(found) == len(cells.KERNELS) * len(cells.cells()) - len(without)
    assert not any("tensor" in path.name for path in found for cell in without if cell in path.name)
    for path, text in found.items():
        assert path.read_text() == text, f"{path.relative_to(ROOT)}: run `python -m tools.cells`"


def test_no_file_names_a_cell_that_is_gone() -> None:
    for name in cells.KERNELS:
        assert set(cells.CSRC.glob(name.format(cell="*"))) <= set(cells.files())
