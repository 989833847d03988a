"""The table of algorithms in docs/reference/algorithms.md, as the table of operations has them."""

import numpy as np

from nexar.arrays.operators import reduction_of
from nexar.collectives.operations import COLLECTIVES, Collective
from nexar.collectives.reductions import rounding_of
from nexar.collectives.schedules.algorithm import Algorithm

_FIRST = "| Operation | Algorithm | Steps |"


def algorithms(page: str) -> str:
    """The page, with its table of algorithms made anew."""
    lines = page.splitlines(keepends=True)
    begin = next(number for number, line in enumerate(lines) if line.startswith(_FIRST)) + 2
    end = next(number for number, line in enumerate(lines) if number >= begin and not line.strip())
    return "".join([*lines[:begin], *_rows(), *lines[end:]])


def _rows() -> list[str]:
    own = [row for row in COLLECTIVES.values() if row.same_as is None]
    return [_row(row, name, each) for row in own for name, each in row.algorithms.items()]


def _row(row: Collective, name: str, algorithm: Algorithm) -> str:
    cost = algorithm.cost
    assert cost is not None, f"{row.name}, {name}: its cost is not stated"
    cells = (
        row.name,
        name,
        f"`{cost.steps}`",
        f"`{cost.sent}`" + " *" * cost.powers_of_two,
        f"`{cost.memory}`",
        "yes" if algorithm.ordered else "no",
        "yes" if algorithm.left_fold else "no",
        _rounded(row, name),
    )
    return f"| {' | '.join(cells)} |\n"


def _rounded(row: Collective, name: str) -> str:
    if row.operands is None:
        return "never"
    few, many = (
        rounding_of(name, row.code, reduction_of("avg"), np.dtype(np.float16), size=5, large=large)
        for large in (False, True)
    )
    return few.value if few is many else f"{few.value}, or {many.value} time"
