"""Four ranks fit one line to data that is distributed over them.

    nexar run -n 4 examples/first_all_reduce.py

Each rank has its own points near y = 3x + 2. In each step it computes the gradient for its points, `all_reduce`
averages the gradients, and every rank makes the same step. All ranks end with the same bits: the line that fits all
points.
"""

import time

import numpy as np

import nexar

POINTS = 100_000
STEPS = 60
LEARNING_RATE = 0.5


def points(rank: int) -> tuple[np.ndarray, np.ndarray]:
    """The points of this rank."""
    random = np.random.default_rng(rank)
    x = random.uniform(-1, 1, POINTS)
    return x, 3 * x + 2 + random.normal(0, 0.1, POINTS)


def gradient(line: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The gradient of the mean squared error for these points."""
    error = line[0] * x + line[1] - y
    return np.array([2 * np.mean(error * x), 2 * np.mean(error)])


def fit(comm: nexar.Communicator) -> np.ndarray:
    """Fit the line. The result is the same on every rank."""
    x, y = points(comm.rank)
    line = np.zeros(2)
    for _ in range(STEPS):
        line -= LEARNING_RATE * comm.all_reduce(gradient(line, x, y), op="avg")
    return line


def main() -> None:
    """Run one rank."""
    with nexar.init() as comm:
        begin = time.perf_counter()
        line = fit(comm)
        seconds = comm.all_reduce(time.perf_counter() - begin, op="max")  # the slowest rank
        lines = comm.gather(line)  # on rank 0 one row for each rank; None elsewhere
        if lines is not None:
            assert (lines == lines[0]).all()
            assert abs(line - (3, 2)).max() < 0.01
            print(f"{comm.size} ranks with {POINTS:,} points each: y = {line[0]:.3f}x + {line[1]:.3f}, "
                  f"the same bits on every rank, in {seconds:.2f} s")  # fmt: skip


if __name__ == "__main__":
    main()
