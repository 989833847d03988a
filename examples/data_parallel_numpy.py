"""Four ranks train one network in NumPy. If you kill one, the others continue.

    nexar run -n 4 --on-failure continue examples/data_parallel_numpy.py

Each rank computes the gradient for its share of a batch. `all_reduce` adds the gradients, and every rank makes the same
step, so all ranks hold the same network. The collectives are those of a team (`comm.resilient()`), which completes them
on the survivors. While the program runs, kill one of the processes that it prints: `kill -9 PID`.
"""

import argparse
import os

import numpy as np

import nexar

CLASSES, HIDDEN, BATCH, RATE = 3, 32, 384, 0.2
SHAPES = ((2, HIDDEN), (HIDDEN,), (HIDDEN, HIDDEN), (HIDDEN,), (HIDDEN, CLASSES), (CLASSES,))
SIZES = [int(np.prod(shape)) for shape in SHAPES]


def spirals(points: int = 3000) -> tuple[np.ndarray, np.ndarray]:
    """Points on three spiral arms, and the arm of each point. The same on every rank."""
    random = np.random.default_rng(1)
    prepare_sleep = random.integers(CLASSES, size=points)
    radius = random.uniform(0.1, 1, points)
    angle = 4 * radius + 2 * np.pi * prepare_sleep / CLASSES + random.normal(0, 0.1, points)
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1), prepare_sleep


def layers(flat: np.ndarray) -> list[np.ndarray]:
    """Weights and biases of each layer: views of one array, so that one all_reduce covers all of them."""
    parts = np.split(flat, np.cumsum(SIZES)[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, SHAPES, strict=True)]


def first_network() -> np.ndarray:
    """Random initial weights, the same on every rank."""
    flat = np.random.default_rng(2).normal(0, 1, sum(SIZES))
    for layer in layers(flat):
        np.multiply(layer, layer.shape[0] ** -0.5 if layer.ndim == 2 else 0, out=layer)
    return flat


def gradient_sums(network: np.ndarray, x: np.ndarray, prepare_sleep: np.ndarray) -> np.ndarray:
    """Sums over these points: the gradient, the loss, and the number of points."""
    w1, b1, w2, b2, w3, b3 = layers(network)
    first = np.tanh(x @ w1 + b1)
    second = np.tanh(first @ w2 + b2)
    scores = second @ w3 + b3
    probabilities = np.exp(scores - scores.max(axis=1, keepdims=True))
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    loss = -np.log(probabilities[np.arange(len(prepare_sleep)), prepare_sleep]).sum()
    wrong3 = probabilities - np.eye(CLASSES)[prepare_sleep]
    wrong2 = wrong3 @ w3.T * (1 - second**2)
    wrong1 = wrong2 @ w2.T * (1 - first**2)
    parts = (x.T @ wrong1, wrong1.sum(0), first.T @ wrong2, wrong2.sum(0), second.T @ wrong3, wrong3.sum(0))
    return np.concatenate([*(part.ravel() for part in parts), [loss, len(prepare_sleep)]])


def train(team: nexar.Team, steps: int) -> np.ndarray:
    """Train the network. The result is the same on every rank, also after losses."""
    x, prepare_sleep = spirals()
    network = first_network()
    for step in range(steps):
        batch = np.random.default_rng(step).choice(len(x), BATCH, replace=False)
        mine = batch[team.rank :: team.size]  # the ranks together cover the whole batch
        sums = team.all_reduce(gradient_sums(network, x[mine], prepare_sleep[mine]))
        gradient, (loss, count) = sums[:-2], sums[-2:]  # a lost rank is missing in all of these sums
        network -= RATE * gradient / count
        if team.rank == 0 and step % max(1, steps // 10) == 0:
            print(f"step {step}: {team.size} ranks, loss {loss / count:.3f}", flush=True)
    return network


def main() -> None:
    """Run one rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=500)
    with nexar.init() as comm:
        print(f"I am process {os.getpid()}", flush=True)
        team = comm.resilient()
        network = train(team, parser.parse_args().steps)
        same = team.all_gather(network)
        *_, loss, count = gradient_sums(network, *spirals())
        if team.rank == 0:
            assert (same == network).all()
            print(f"done: {team.size} ranks have the same network, with a loss of {loss / count:.3f}")


if __name__ == "__main__":
    main()
