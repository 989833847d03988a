"""Four ranks train a small network twice: once with whole gradients, once with 1 % of each gradient.

    nexar run -n 4 examples/compressed_gradients.py

The network has two layers and classifies points into ten classes. Each rank has its own points. `TopK(0.01)` sends the
largest 1 % of the elements of a gradient. The rest stays in `residual`, and the next call adds it to the next gradient.
The final loss is nearly the same.
"""

import numpy as np

import nexar

INPUTS, HIDDEN, CLASSES = 32, 64, 10
POINTS = 1000  # for each rank
BATCH = 100
EPOCHS = 30
LEARNING_RATE = 0.1
SHAPES = [(INPUTS, HIDDEN), (HIDDEN,), (HIDDEN, CLASSES), (CLASSES,)]


def points(rank: int) -> tuple[np.ndarray, np.ndarray]:
    """The points and labels of this rank. The ten classes overlap."""
    centres = np.random.default_rng(0).normal(size=(CLASSES, INPUTS))
    random = np.random.default_rng(1 + rank)
    labels = random.integers(CLASSES, size=POINTS)
    return (centres[labels] + random.normal(0, 1.7, (POINTS, INPUTS))).astype(np.float32), labels


def network() -> np.ndarray:
    """All initial weights in one flat array, the same on every rank."""
    random = np.random.default_rng(99)
    layers = [random.normal(0, shape[0] ** -0.5, shape) if len(shape) > 1 else np.zeros(shape) for shape in SHAPES]
    return np.concatenate([layer.ravel() for layer in layers]).astype(np.float32)


def layers_of(weights: np.ndarray) -> list[np.ndarray]:
    """Views of the flat array, one for each layer."""
    ends = np.cumsum([np.prod(shape) for shape in SHAPES])[:-1]
    return [part.reshape(shape) for part, shape in zip(np.split(weights, ends), SHAPES, strict=True)]


def loss_and_gradient(weights: np.ndarray, x: np.ndarray, labels: np.ndarray) -> tuple[float, np.ndarray]:
    """The cross-entropy and its gradient."""
    first, bias, second, second_bias = layers_of(weights)
    hidden = np.maximum(x @ first + bias, 0)
    scores = hidden @ second + second_bias
    scores -= scores.max(axis=1, keepdims=True)
    probabilities = np.exp(scores)
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    loss = -np.log(probabilities[np.arange(len(x)), labels]).mean()
    probabilities[np.arange(len(x)), labels] -= 1
    probabilities /= len(x)
    back = (probabilities @ second.T) * (hidden > 0)
    parts = [x.T @ back, back.sum(axis=0), hidden.T @ probabilities, probabilities.sum(axis=0)]
    return float(loss), np.concatenate([part.ravel() for part in parts])


def train(comm: nexar.Communicator, compressor: nexar.Compressor) -> float:
    """Train, and return the loss over the points of all ranks."""
    x, labels = points(comm.rank)
    weights = network()
    residual = np.zeros_like(weights)
    random = np.random.default_rng(500 + comm.rank)
    for _ in range(EPOCHS):
        for batch in np.array_split(random.permutation(POINTS), POINTS // BATCH):
            _, gradient = loss_and_gradient(weights, x[batch], labels[batch])
            comm.all_reduce_compressed(gradient, compressor, residual=residual, op="avg")
            weights -= LEARNING_RATE * gradient
    loss: float = comm.all_reduce(loss_and_gradient(weights, x, labels)[0], op="avg")
    return loss


def main() -> None:
    """Run one rank."""
    with nexar.init() as comm:
        dense = train(comm, nexar.NoCompression())
        sparse = train(comm, nexar.TopK(0.01))
        if comm.rank == 0:
            print(f"{comm.size} ranks, {len(network()):,} weights: loss {dense:.4f} with whole gradients, "
                  f"{sparse:.4f} with 1 % of them ({sparse / dense - 1:+.1%})")  # fmt: skip


if __name__ == "__main__":
    main()
