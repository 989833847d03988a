"""Measures reductions beside NumPy's arithmetic on the same arrays.

    python benchmarks/reduce.py
    python benchmarks/reduce.py --op max --size 1048576 --inputs 4 --repetitions 15

GB/s: bytes of the result by CPU time of one thread, which other load hardly affects. `combine` takes two arrays, `fold`
as many as requested. NumPy calls the ufunc once per further array. Medians of interleaved runs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from nexar.arrays.dtypes import DTYPES
from nexar.arrays.operators import check, reduction_of
from nexar.arrays.reduce import combiner, folder
from nexar.errors import UsageError

Array = NDArray[Any]
UFUNCS = {
    "sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum, "band": np.bitwise_and,
    "bor": np.bitwise_or, "bxor": np.bitwise_xor, "land": np.logical_and, "lor": np.logical_or, "lxor": np.logical_xor,
}  # fmt: skip


def main() -> None:
    """Measures and prints."""
    options = parse()
    table = Table(title=f"{options.op}, {options.size / 1e6:g} MB, GB/s of the result", pad_edge=False)
    several = f"{options.inputs} arrays"
    for heading in ("dtype", "2 arrays: NumPy", "combine", "fold", f"{several}: NumPy", "fold"):
        table.add_column(heading, justify="right" if heading != "dtype" else "left")
    for dtype in DTYPES:
        table.add_row(str(dtype), *measure(dtype, options))
    Console().print(table)


def measure(dtype: np.dtype[Any], options: argparse.Namespace) -> list[str]:
    """One row: medians, and in parentheses the factor to NumPy."""
    reduction, ufunc = reduction_of(options.op), UFUNCS[options.op]
    try:
        check(reduction, dtype)
    except UsageError:
        return ["not defined"]
    inputs = [numbers(dtype, options.size // dtype.itemsize, seed) for seed in range(options.inputs)]
    out = np.empty_like(inputs[0])
    combine, fold = combiner(reduction, dtype), folder(reduction, dtype)

    def by_numpy(arrays: list[Array]) -> None:
        ufunc(arrays[0], arrays[1], out=out)
        for one in arrays[2:]:
            ufunc(out, one, out=out)

    two = inputs[:2]
    seconds = in_turns(
        [
            lambda: by_numpy(two),
            lambda: combine(out, *two),
            lambda: fold(out, two),
            lambda: by_numpy(inputs),
            lambda: fold(out, inputs),
        ],
        options.repetitions,
    )
    rates = [out.nbytes / one / 1e9 for one in seconds]
    cells = [f"{rate:.2f}" for rate in rates]
    for ours, theirs in ((1, 0), (2, 0), (4, 3)):
        cells[ours] += f" ({rates[ours] / rates[theirs]:.1f}×)"
    return cells


def numbers(dtype: np.dtype[Any], count: int, seed: int) -> Array:
    """Like gradients: centered at zero; small integers for integer types."""
    drawn = np.random.default_rng(seed).standard_normal(count, np.float32)
    return drawn.astype(dtype) if dtype.kind in "fVc" else (drawn * 3).astype(np.int8).astype(dtype)


def in_turns(candidates: list[Callable[[], None]], repetitions: int) -> list[float]:
    """The median time of each, interleaved; the first round warms up."""
    times: list[list[float]] = [[] for _ in candidates]
    turn = list(zip(candidates, times, strict=True))
    for _ in range(repetitions + 1):
        turn.reverse()  # the cache contents of the previous candidate help both neighbours
        for candidate, found in turn:
            begin = time.thread_time()
            candidate()
            found.append(time.thread_time() - begin)
    return [statistics.median(found[1:]) for found in times]


def parse() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description="GB/s of reductions, beside NumPy's own")
    parser.add_argument("--op", choices=sorted(UFUNCS), default="sum")
    parser.add_argument("--size", type=int, default=4 << 20, help="bytes of one array")
    parser.add_argument("--inputs", type=int, default=4, help="arrays in the fold of several")
    parser.add_argument("--repetitions", type=int, default=11)
    return parser.parse_args()


if __name__ == "__main__":
    main()
