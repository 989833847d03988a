"""Four ranks learn one line from data that none of them has whole.

    nexar run -n 4 examples/first_all_reduce.py

Each rank draws points of its own near y = 3x + 2. Step by step it works out which way its points would have the line
move, `all_reduce` makes that the average of all ranks, and everybody moves alike. So all ranks hold the same line, bit
by bit, and it is the line of all points together.
"""

import time

import numpy as np

import nexar

POINTS = 100_000
STEPS = 60
SPEED = 0.5


def points(rank: int) -> tuple[np.ndarray, np.ndarray]:
    """What only this rank knows."""
    random = np.random.default_rng(rank)
    x = random.uniform(-1, 1, POINTS)
    return x, 3 * x + 2 + random.normal(0, 0.1, POINTS)


def direction(line: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The gradient of the mean squared error, for this rank's points."""
    error = line[0] * x + line[1] - y
    return np.array([2 * np.mean(error * x), 2 * np.mean(error)])


def learn(comm: nexar.Communicator) -> np.ndarray:
    """The same line on every rank."""
    x, y = points(comm.rank)
    line = np.zeros(2)
    for _ in range(STEPS):
        line -= SPEED * comm.all_reduce(direction(line, x, y), op="avg")
    return line


def main() -> None:
    """What each rank does."""
    with nexar.init() as comm:
        begin = time.perf_counter()
        line = learn(comm)
        seconds = comm.all_reduce(time.perf_counter() - begin, op="max")  # of the slowest
        lines = comm.gather(line)  # at rank 0, one row for each rank
        if lines is not None:
            assert (lines == lines[0]).all()
            assert abs(line - (3, 2)).max() < 0.01
            print(f"{comm.size} ranks with {POINTS:,} points each found y = {line[0]:.3f}x + {line[1]:.3f}, "
                  f"all of them the same bits, in {seconds:.2f} s")  # fmt: skip


if __name__ == "__main__":
    main()
