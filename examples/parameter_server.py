"""One rank keeps the model, the others learn and call it: a parameter server, with remote calls.

    nexar run -n 4 examples/parameter_server.py

Rank 0 serves two functions, `pull` and `push`, and nothing else. Each worker pulls the weights, works out a gradient
from data that only it has, and pushes it, at its own speed: nobody waits for anybody else. So a gradient may belong to
weights that are some versions old by the time it arrives, and the server counts how many.
"""

import threading

import numpy as np

import nexar

WEIGHTS = np.linspace(-1, 1, 20)  # what is to be found
PUSHES, RATE, POINTS = 150, 0.05, 64


class Model:
    """The weights, and how often they have changed. Calls of several workers run at the same time, in threads."""

    def __init__(self) -> None:
        self.weights = np.zeros_like(WEIGHTS)
        self.version = 0
        self.stale = 0
        self._lock = threading.Lock()

    def pull(self) -> tuple[int, np.ndarray]:
        """The newest weights, and their version."""
        with self._lock:
            return self.version, self.weights.copy()

    def push(self, version: int, gradient: np.ndarray) -> int:
        """Take a step. How many others had taken one since these weights were pulled."""
        with self._lock:
            late = self.version - version
            self.weights -= RATE * gradient
            self.version += 1
            self.stale += late
            return late


def serve(comm: nexar.Communicator) -> None:
    """The server's part: register, wait until the workers are done, say what came of it."""
    model = Model()
    comm.serve(model.pull)
    comm.serve(model.push)
    comm.barrier()  # from here on it may be called
    comm.barrier(timeout=120)  # the calls are answered meanwhile, by threads of nexar's own
    error = np.abs(model.weights - WEIGHTS).max()
    assert model.version == PUSHES * (comm.size - 1)
    assert error < 0.02
    print(f"{model.version} gradients of {comm.size - 1} workers, on average {model.stale / model.version:.1f} "
          f"versions old: the weights are off by at most {error:.4f}")  # fmt: skip


def learn(comm: nexar.Communicator) -> None:
    """A worker's part."""
    random = np.random.default_rng(comm.rank)
    server = comm.on(0, timeout=10)
    comm.barrier()
    latest = 0
    for _ in range(PUSHES):
        version, weights = server.pull()
        x = random.normal(size=(POINTS, len(WEIGHTS)))
        y = x @ WEIGHTS + random.normal(0, 0.01, POINTS)
        latest = max(latest, server.push(version, x.T @ (x @ weights - y) / POINTS))
    print(f"pushed {PUSHES} gradients, the oldest of them {latest} versions late")
    comm.barrier(timeout=120)


if __name__ == "__main__":
    with nexar.init() as world:
        if world.size < 2:
            raise SystemExit("a server and its workers are at least two ranks: nexar run -n 2 …")
        serve(world) if world.rank == 0 else learn(world)
