"""Four ranks train a small network; once with whole gradients, once sending 1 % of each and keeping the rest for later.

    nexar run -n 4 examples/compressed_gradients.py

The network has two layers and learns to tell ten kinds of points apart, from points that no rank has whole.
`TopK(0.01)` sends the largest hundredth of a gradient; what is not sent stays in `residual`, which the next call adds
to the next gradient. So nothing is lost, only late, and the network gets as good.
"""

import numpy as np

import nexar

INPUTS, HIDDEN, KINDS = 32, 64, 10
POINTS = 1000  # of each rank
BATCH = 100
EPOCHS = 30
SPEED = 0.1
SHAPES = [(INPUTS, HIDDEN), (HIDDEN,), (HIDDEN, KINDS), (KINDS,)]


def points(rank: int) -> tuple[np.ndarray, np.ndarray]:
    """What only this rank knows: points around ten centres that are near enough to be mistaken for one another."""
    centres = np.random.default_rng(0).normal(size=(KINDS, INPUTS))
    random = np.random.default_rng(1 + rank)
    kinds = random.integers(KINDS, size=POINTS)
    return (centres[kinds] + random.normal(0, 1.7, (POINTS, INPUTS))).astype(np.float32), kinds


def network() -> np.ndarray:
    """All weights in one row, the same on every rank."""
    random = np.random.default_rng(99)
    layers = [random.normal(0, shape[0] ** -0.5, shape) if len(shape) > 1 else np.zeros(shape) for shape in SHAPES]
    return np.concatenate([layer.ravel() for layer in layers]).astype(np.float32)


def layers_of(weights: np.ndarray) -> list[np.ndarray]:
    """The same memory, by layer."""
    ends = np.cumsum([np.prod(shape) for shape in SHAPES])[:-1]
    return [part.reshape(shape) for part, shape in zip(np.split(weights, ends), SHAPES, strict=True)]


def loss_and_gradient(weights: np.ndarray, x: np.ndarray, kinds: np.ndarray) -> tuple[float, np.ndarray]:
    """Cross-entropy, and which way each weight would raise it."""
    first, bias, second, second_bias = layers_of(weights)
    hidden = np.maximum(x @ first + bias, 0)
    scores = hidden @ second + second_bias
    scores -= scores.max(axis=1, keepdims=True)
    odds = np.exp(scores)
    odds /= odds.sum(axis=1, keepdims=True)
    loss = -np.log(odds[np.arange(len(x)), kinds]).mean()
    odds[np.arange(len(x)), kinds] -= 1
    odds /= len(x)
    back = (odds @ second.T) * (hidden > 0)
    parts = [x.T @ back, back.sum(axis=0), hidden.T @ odds, odds.sum(axis=0)]
    return float(loss), np.concatenate([part.ravel() for part in parts])


def train(comm: nexar.Communicator, compressor: nexar.Compressor) -> float:
    """The loss over all points of all ranks, at the end."""
    x, kinds = points(comm.rank)
    weights = network()
    residual = np.zeros_like(weights)
    random = np.random.default_rng(500 + comm.rank)
    for _ in range(EPOCHS):
        for batch in np.array_split(random.permutation(POINTS), POINTS // BATCH):
            _, gradient = loss_and_gradient(weights, x[batch], kinds[batch])
            comm.all_reduce_compressed(gradient, compressor, residual=residual, op="avg")
            weights -= SPEED * gradient
    loss: float = comm.all_reduce(loss_and_gradient(weights, x, kinds)[0], op="avg")
    return loss


def main() -> None:
    """What each rank does."""
    with nexar.init() as comm:
        dense = train(comm, nexar.NoCompression())
        sparse = train(comm, nexar.TopK(0.01))
        if comm.rank == 0:
            print(f"{comm.size} ranks, {len(network()):,} weights: loss {dense:.4f} with whole gradients, "
                  f"{sparse:.4f} with 1 % of them ({sparse / dense - 1:+.1%})")  # fmt: skip


if __name__ == "__main__":
    main()
