"""A parameter server: rank 0 holds the model, and the workers update it with remote calls.

    nexar run -n 4 examples/parameter_server.py

Rank 0 serves two functions, `pull` and `push`. Each worker pulls the weights, computes a gradient from its own data and
pushes it. The workers do not wait for one another, so a gradient may be based on older weights. The server counts the
difference in versions.
"""

import threading

import numpy as np

import nexar

WEIGHTS = np.linspace(-1, 1, 20)  # the weights to find
PUSHES, RATE, POINTS = 150, 0.05, 64


class Model:
    """The weights and their version. Calls of several workers run concurrently, in threads."""

    def __init__(self) -> None:
        self.weights = np.zeros_like(WEIGHTS)
        self.version = 0
        self.stale = 0
        self._lock = threading.Lock()

    def pull(self) -> tuple[int, np.ndarray]:
        """The current version and weights."""
        with self._lock:
            return self.version, self.weights.copy()

    def push(self, version: int, gradient: np.ndarray) -> int:
        """Apply a gradient. Return the number of updates since these weights were pulled."""
        with self._lock:
            late = self.version - version
            self.weights -= RATE * gradient
            self.version += 1
            self.stale += late
            return late


def serve(comm: nexar.Communicator) -> None:
    """Run the server: register the functions, wait for the workers, check the result."""
    model = Model()
    comm.serve(model.pull)
    comm.serve(model.push)
    comm.barrier()  # the workers may call from here on
    comm.barrier(timeout=120)  # nexar's threads answer calls while this waits
    error = np.abs(model.weights - WEIGHTS).max()
    assert model.version == PUSHES * (comm.size - 1)
    assert error < 0.02
    print(f"{model.version} gradients of {comm.size - 1} workers, on average {model.stale / model.version:.1f} "
          f"versions old: the weights are off by at most {error:.4f}")  # fmt: skip


def train(comm: nexar.Communicator) -> None:
    """Run one worker."""
    random = np.random.default_rng(comm.rank)
    server = comm.on(0, timeout=10)
    comm.barrier()
    latest = 0
    for _ in range(PUSHES):
        version, weights = server.pull()
        x = random.normal(size=(POINTS, len(WEIGHTS)))
        y = x @ WEIGHTS + random.normal(0, 0.01, POINTS)
        latest = max(latest, server.push(version, x.T @ (x @ weights - y) / POINTS))
    print(f"pushed {PUSHES} gradients, at most {latest} versions old")
    comm.barrier(timeout=120)


if __name__ == "__main__":
    with nexar.init() as world:
        if world.size < 2:
            raise SystemExit("this example needs at least two ranks: nexar run -n 2 …")
        serve(world) if world.rank == 0 else train(world)
