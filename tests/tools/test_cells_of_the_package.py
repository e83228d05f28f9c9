"""The files that name a cell of the package, which `python -m tools.cells` writes."""

from extops_build import ROOT
from tools import cells


def test_files_are_as_written() -> None:
    found = cells.files()
    assert len(found) == len(cells.KERNELS) * len(cells.cells()) - len(cells.WRITTEN_BY_HAND)
    for path, text in found.items():
        assert path.read_text() == text, f"{path.relative_to(ROOT)}: run `python -m tools.cells`"


def test_no_file_names_a_cell_that_is_gone() -> None:
    written = {*cells.files(), *(cells.CSRC / name for name in cells.WRITTEN_BY_HAND)}
    for name in cells.KERNELS:
        assert set(cells.CSRC.glob(name.format(cell="*"))) <= written
