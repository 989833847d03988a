"""Four ranks train one network in NumPy; kill any of them, and the others go on learning.

    nexar run -n 4 --on-failure continue examples/data_parallel_numpy.py

Each rank works out the gradient of its share of a batch. `all_reduce` adds the shares up, and everybody takes the same
step: so all ranks hold the same network, bit by bit. The collectives are those of a team (`comm.resilient()`), which
carries them through on whoever is left. While it runs, kill one of the processes that it names: `kill -9 PID`.
"""

import argparse
import os

import numpy as np

import nexar

CLASSES, HIDDEN, BATCH, RATE = 3, 32, 384, 0.2
SHAPES = ((2, HIDDEN), (HIDDEN,), (HIDDEN, HIDDEN), (HIDDEN,), (HIDDEN, CLASSES), (CLASSES,))
SIZES = [int(np.prod(shape)) for shape in SHAPES]


def spirals(points: int = 3000) -> tuple[np.ndarray, np.ndarray]:
    """Three arms, wound round one another: which one does a point belong to? The same on every rank."""
    random = np.random.default_rng(1)
    arm = random.integers(CLASSES, size=points)
    radius = random.uniform(0.1, 1, points)
    angle = 4 * radius + 2 * np.pi * arm / CLASSES + random.normal(0, 0.1, points)
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1), arm


def layers(flat: np.ndarray) -> list[np.ndarray]:
    """Weights and offsets of each layer: views of one array, so that one all_reduce takes all of them."""
    parts = np.split(flat, np.cumsum(SIZES)[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, SHAPES, strict=True)]


def first_network() -> np.ndarray:
    """By chance, and the same on every rank."""
    flat = np.random.default_rng(2).normal(0, 1, sum(SIZES))
    for layer in layers(flat):
        np.multiply(layer, layer.shape[0] ** -0.5 if layer.ndim == 2 else 0, out=layer)
    return flat


def learn_from(network: np.ndarray, x: np.ndarray, arm: np.ndarray) -> np.ndarray:
    """Sums over these points: the gradient, then the loss, then how many there were."""
    w1, b1, w2, b2, w3, b3 = layers(network)
    first = np.tanh(x @ w1 + b1)
    second = np.tanh(first @ w2 + b2)
    scores = second @ w3 + b3
    chances = np.exp(scores - scores.max(axis=1, keepdims=True))
    chances /= chances.sum(axis=1, keepdims=True)
    loss = -np.log(chances[np.arange(len(arm)), arm]).sum()
    wrong3 = chances - np.eye(CLASSES)[arm]
    wrong2 = wrong3 @ w3.T * (1 - second**2)
    wrong1 = wrong2 @ w2.T * (1 - first**2)
    parts = (x.T @ wrong1, wrong1.sum(0), first.T @ wrong2, wrong2.sum(0), second.T @ wrong3, wrong3.sum(0))
    return np.concatenate([*(part.ravel() for part in parts), [loss, len(arm)]])


def train(team: nexar.Team, steps: int) -> np.ndarray:
    """The network, the same on every rank, whoever is lost on the way."""
    x, arm = spirals()
    network = first_network()
    for step in range(steps):
        batch = np.random.default_rng(step).choice(len(x), BATCH, replace=False)
        mine = batch[team.rank :: team.size]  # together always the whole batch, however many we are
        sums = team.all_reduce(learn_from(network, x[mine], arm[mine]))
        gradient, (loss, count) = sums[:-2], sums[-2:]  # who was lost is missing in each of them alike
        network -= RATE * gradient / count
        if team.rank == 0 and step % max(1, steps // 10) == 0:
            print(f"step {step}: {team.size} ranks, loss {loss / count:.3f}", flush=True)
    return network


def main() -> None:
    """What each rank does."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=500)
    with nexar.init() as comm:
        print(f"I am process {os.getpid()}", flush=True)
        team = comm.resilient()
        network = train(team, parser.parse_args().steps)
        same = team.all_gather(network)
        *_, loss, count = learn_from(network, *spirals())
        if team.rank == 0:
            assert (same == network).all()
            print(f"done: {team.size} ranks have the same network, with a loss of {loss / count:.3f}")


if __name__ == "__main__":
    main()
