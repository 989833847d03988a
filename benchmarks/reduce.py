"""Measures reductions: the native kernels, nexar's NumPy path, and NumPy's own arithmetic on the same arrays.

    python benchmarks/reduce.py
    python benchmarks/reduce.py --op max --sizes 4096 1048576 --dtypes float32 bfloat16 --inputs 4 --repetitions 15

GB/s: bytes of the result by CPU time of one thread, which other load hardly affects. `NumPy` calls the ufunc once per
further array. `fallback` is what nexar does without the native package. In parentheses: the factor of `native` to the
faster one of the two. Medians of interleaved runs.
"""

from __future__ import annotations

import argparse
import random
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
from nexar.arrays.reduce import combiner, folder, numpy_combiner, numpy_folder
from nexar.errors import UsageError
from nexar.native import native_problem

Array = NDArray[Any]
UFUNCS = {
    "sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum, "band": np.bitwise_and,
    "bor": np.bitwise_or, "bxor": np.bitwise_xor, "land": np.logical_and, "lor": np.logical_or, "lxor": np.logical_xor,
}  # fmt: skip
BATCH = 4 << 20  # bytes that are reduced between two readings of the clock


def main() -> None:
    """Measures and prints."""
    options = parse()
    if problem := native_problem():
        raise SystemExit(f"benchmarks/reduce.py needs the native package: {problem}")
    for size in options.sizes:
        table = Table(title=f"{options.op}, {size / 1024:g} KiB, GB/s of the result", pad_edge=False)
        several = f"{options.inputs} arrays"
        for heading in ("dtype", "2 arrays: NumPy", "fallback", "native", f"{several}: NumPy", "fallback", "native"):
            table.add_column(heading, justify="right" if heading != "dtype" else "left")
        for dtype in DTYPES:
            if not options.dtypes or str(dtype) in options.dtypes:
                table.add_row(str(dtype), *measure(dtype, size, options))
        Console().print(table)


def measure(dtype: np.dtype[Any], size: int, options: argparse.Namespace) -> list[str]:
    """One row: medians, and in parentheses the factor to NumPy."""
    reduction, ufunc = reduction_of(options.op), UFUNCS[options.op]
    try:
        check(reduction, dtype)
    except UsageError:
        return ["not defined"]
    inputs = [numbers(dtype, size // dtype.itemsize, seed) for seed in range(options.inputs)]
    out = np.empty_like(inputs[0])
    combine, fold = combiner(reduction, dtype), folder(reduction, dtype)
    combine_by_numpy, fold_by_numpy = numpy_combiner(reduction.code, dtype), numpy_folder(reduction.code, dtype)

    def by_ufunc(arrays: list[Array]) -> None:
        ufunc(arrays[0], arrays[1], out=out)
        for one in arrays[2:]:
            ufunc(out, one, out=out)

    two = inputs[:2]
    seconds = in_turns(
        [
            lambda: by_ufunc(two),
            lambda: combine_by_numpy(out, *two),
            lambda: combine(out, *two),
            lambda: by_ufunc(inputs),
            lambda: fold_by_numpy(out, inputs),
            lambda: fold(out, inputs),
        ],
        options.repetitions,
        max(1, BATCH // size),
    )
    rates = [out.nbytes / one / 1e9 for one in seconds]
    cells = [f"{rate:.2f}" for rate in rates]
    for native in (2, 5):
        cells[native] += f" ({rates[native] / max(rates[native - 2 : native]):.1f}×)"
    return cells


def numbers(dtype: np.dtype[Any], count: int, seed: int) -> Array:
    """Like gradients: centered at zero; small integers for integer types."""
    drawn = np.random.default_rng(seed).standard_normal(count, np.float32)
    return drawn.astype(dtype) if dtype.kind in "fVc" else (drawn * 3).astype(np.int8).astype(dtype)


def in_turns(candidates: list[Callable[[], None]], repetitions: int, batch: int) -> list[float]:
    """The median time of one call of each, interleaved; the first round warms up."""
    times: list[list[float]] = [[] for _ in candidates]
    turn, order = list(zip(candidates, times, strict=True)), random.Random(0)
    for _ in range(repetitions + 1):
        order.shuffle(turn)  # what the candidate before leaves in the cache helps some more than others
        for candidate, found in turn:
            begin = time.thread_time()
            for _ in range(batch):
                candidate()
            found.append((time.thread_time() - begin) / batch)
    return [statistics.median(found[1:]) for found in times]


def parse() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description="GB/s of reductions, beside NumPy's own")
    parser.add_argument("--op", choices=sorted(UFUNCS), default="sum")
    parser.add_argument("--sizes", type=int, nargs="+", default=[4 << 10, 64 << 10, 1 << 20, 16 << 20], help="bytes")
    parser.add_argument("--dtypes", nargs="+", choices=list(map(str, DTYPES)), default=[], help="default: all")
    parser.add_argument("--inputs", type=int, default=4, help="arrays in the fold of several")
    parser.add_argument("--repetitions", type=int, default=21)
    return parser.parse_args()


if __name__ == "__main__":
    main()
