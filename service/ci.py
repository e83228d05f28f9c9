"""Says which jobs the workflows start for cells: `nox -s matrix -- small`, or `full`.

A line for each list, as a step hands its outputs on: `build=[{"cell": "3.11-cpu", …}, …]`.
"""

from __future__ import annotations

import argparse
import json

from service.matrix import Cell, Matrix, load

Job = dict[str, str]


def jobs(matrix: Matrix, cells: tuple[Cell, ...]) -> dict[str, list[Job]]:
    """The cells to build, to test, and to test on a GPU, for wheels that serve all of `cells`.

    One cell builds the wheel of its variant for all Pythons. On a GPU one Python will do: the
    kernels know nothing of it.
    """
    variants = {cell.variant for cell in cells}
    default = [cell for cell in cells if cell.python == matrix.default_python]
    return {
        "build": [job(cell) for cell in matrix.default_cells if cell.variant in variants],
        "test": [job(cell) for cell in cells],
        "gpu": [job(cell) for cell in default if cell.variant.runner == "gpu"],
    }


def job(cell: Cell) -> Job:
    """What a job needs to know of its cell."""
    return {"cell": cell.name, "variant": cell.variant.name, "python": cell.python}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m service.ci", description=__doc__)
    parser.add_argument("cells", choices=["small", "full"], help="which cells")
    matrix = load()
    cells = matrix.small if parser.parse_args().cells == "small" else matrix.cells
    for name, found in jobs(matrix, cells).items():
        print(f"{name}={json.dumps(found)}")


if __name__ == "__main__":
    main()
