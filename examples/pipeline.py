"""Each rank holds one layer of a network: a pipeline, with messages from rank to rank.

    nexar run -n 4 examples/pipeline.py

A batch is cut into pieces. While rank 1 works on the first piece, rank 0 is at the second already. Activations go up
the ranks, and gradients come back down; each rank needs the weights of its own layer alone. In the end rank 0 trains
all layers by itself, and compares.
"""

import time

import numpy as np

import nexar

WIDTH, BATCH, PIECES, STEPS, RATE = 64, 256, 8, 30, 0.2
FORWARD, BACK = 1, 2  # tags: the two directions are two conversations


def task() -> tuple[np.ndarray, np.ndarray]:
    """The first rank needs the inputs, the last one what they should become."""
    random = np.random.default_rng(0)
    x = random.normal(size=(BATCH, WIDTH))
    return x, np.sin(x)


class Layer:
    """tanh(x·W), and the way back."""

    def __init__(self, number: int) -> None:
        random = np.random.default_rng(number + 1)
        self.weights = random.normal(0, WIDTH**-0.5, (WIDTH, WIDTH))
        self.seen: list[tuple[np.ndarray, np.ndarray]] = []  # inputs and outputs of the pieces under way
        self.gradient = np.zeros_like(self.weights)

    def forward(self, x: np.ndarray) -> np.ndarray:
        """The outputs; kept until their gradient comes back."""
        y = np.tanh(x @ self.weights)
        self.seen.append((x, y))
        return y

    def back(self, wrong: np.ndarray) -> np.ndarray:
        """From the gradient of the outputs to that of the inputs, for the piece that came first of those kept."""
        x, y = self.seen.pop(0)
        wrong = wrong * (1 - y * y)
        self.gradient += x.T @ wrong / BATCH
        return wrong @ self.weights.T

    def step(self) -> None:
        """Learn, and forget the gradient."""
        self.weights -= RATE * self.gradient
        self.gradient[:] = 0


def run_stage(comm: nexar.Communicator, layer: Layer, inputs: list[np.ndarray], wanted: list[np.ndarray]) -> float:
    """One batch, piece by piece, through my layer. The loss, at the last rank."""
    first, last = comm.rank == 0, comm.rank == comm.size - 1
    loss, outputs, sent = 0.0, [], []
    for piece in range(PIECES):
        y = layer.forward(inputs[piece] if first else comm.recv(source=comm.rank - 1, tag=FORWARD))
        outputs.append(y)
        if not last:
            sent.append(comm.start.send(y, dest=comm.rank + 1, tag=FORWARD))  # and on to the next piece meanwhile
    for piece in range(PIECES):
        wrong = outputs[piece] - wanted[piece] if last else comm.recv(source=comm.rank + 1, tag=BACK)
        loss += float((wrong**2).sum()) / BATCH if last else 0
        wrong = layer.back(wrong)
        if not first:
            sent.append(comm.start.send(wrong, dest=comm.rank - 1, tag=BACK))
    nexar.wait_all(sent)
    layer.step()
    return loss


def alone(count: int) -> list[np.ndarray]:
    """What the layers become in one process, without pieces."""
    (x, wanted), layers = task(), [Layer(number) for number in range(count)]
    for _ in range(STEPS):
        y = x
        for layer in layers:
            y = layer.forward(y)
        wrong = y - wanted
        for layer in reversed(layers):
            wrong = layer.back(wrong)
            layer.step()
    return [layer.weights for layer in layers]


if __name__ == "__main__":
    with nexar.init() as world:
        mine, (given, goal) = Layer(world.rank), task()
        began = time.perf_counter()
        losses = [run_stage(world, mine, np.split(given, PIECES), np.split(goal, PIECES)) for _ in range(STEPS)]
        seconds = time.perf_counter() - began
        if world.rank == world.size - 1:
            print(f"the loss fell from {losses[0]:.2f} to {losses[-1]:.2f}, in {STEPS} batches and {seconds:.2f} s")
        weights = world.gather(mine.weights)
        if weights is not None:
            assert np.allclose(weights, alone(world.size))
            print(f"{world.size} ranks with a layer each have learned what one process learns alone")
