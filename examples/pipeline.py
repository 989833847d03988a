"""Pipeline parallelism: each rank holds one layer of a network, and sends messages to the next rank.

    nexar run -n 4 examples/pipeline.py

A batch is divided into micro-batches. While rank 1 computes the first one, rank 0 computes the second. Activations go
to the next rank, gradients to the previous one. Each rank needs only the weights of its own layer. At the end rank 0
trains all layers in one process and compares the weights.
"""

import time

import numpy as np

import nexar

WIDTH, BATCH, MICRO_BATCHES, STEPS, RATE = 64, 256, 8, 30, 0.2
FORWARD, BACK = 1, 2  # tags, one for each direction


def task() -> tuple[np.ndarray, np.ndarray]:
    """The inputs, which the first rank needs, and the targets, which the last rank needs."""
    random = np.random.default_rng(0)
    x = random.normal(size=(BATCH, WIDTH))
    return x, np.sin(x)


class Layer:
    """The layer tanh(x·W) and its backward pass."""

    def __init__(self, number: int) -> None:
        random = np.random.default_rng(number + 1)
        self.weights = random.normal(0, WIDTH**-0.5, (WIDTH, WIDTH))
        self.seen: list[tuple[np.ndarray, np.ndarray]] = []  # inputs and outputs that wait for their gradient
        self.gradient = np.zeros_like(self.weights)

    def forward(self, x: np.ndarray) -> np.ndarray:
        """Compute the outputs, and keep them for the backward pass."""
        y = np.tanh(x @ self.weights)
        self.seen.append((x, y))
        return y

    def back(self, error: np.ndarray) -> np.ndarray:
        """Turn the gradient of the outputs into that of the inputs, for the oldest micro-batch."""
        x, y = self.seen.pop(0)
        error = error * (1 - y * y)
        self.gradient += x.T @ error / BATCH
        return error @ self.weights.T

    def step(self) -> None:
        """Apply the gradient and reset it."""
        self.weights -= RATE * self.gradient
        self.gradient[:] = 0


def run_stage(comm: nexar.Communicator, layer: Layer, inputs: list[np.ndarray], targets: list[np.ndarray]) -> float:
    """Run one batch through the layer of this rank. Return the loss on the last rank."""
    first, last = comm.rank == 0, comm.rank == comm.size - 1
    loss, outputs, sent = 0.0, [], []
    for number in range(MICRO_BATCHES):
        y = layer.forward(inputs[number] if first else comm.recv(source=comm.rank - 1, tag=FORWARD))
        outputs.append(y)
        if not last:
            sent.append(comm.start.send(y, dest=comm.rank + 1, tag=FORWARD))  # overlaps with the next micro-batch
    for number in range(MICRO_BATCHES):
        error = outputs[number] - targets[number] if last else comm.recv(source=comm.rank + 1, tag=BACK)
        loss += float((error**2).sum()) / BATCH if last else 0
        error = layer.back(error)
        if not first:
            sent.append(comm.start.send(error, dest=comm.rank - 1, tag=BACK))
    nexar.wait_all(sent)
    layer.step()
    return loss


def alone(count: int) -> list[np.ndarray]:
    """The weights after training in one process, without micro-batches."""
    (x, targets), layers = task(), [Layer(number) for number in range(count)]
    for _ in range(STEPS):
        y = x
        for layer in layers:
            y = layer.forward(y)
        error = y - targets
        for layer in reversed(layers):
            error = layer.back(error)
            layer.step()
    return [layer.weights for layer in layers]


if __name__ == "__main__":
    with nexar.init() as world:
        mine = Layer(world.rank)
        inputs, targets = (np.split(array, MICRO_BATCHES) for array in task())
        began = time.perf_counter()
        losses = [run_stage(world, mine, inputs, targets) for _ in range(STEPS)]
        seconds = time.perf_counter() - began
        if world.rank == world.size - 1:
            print(f"the loss fell from {losses[0]:.2f} to {losses[-1]:.2f}, in {STEPS} batches and {seconds:.2f} s")
        weights = world.gather(mine.weights)
        if weights is not None:
            assert np.allclose(weights, alone(world.size))
            print(f"{world.size} ranks with one layer each: the same weights as in one process")
