"""Training continues while ranks join and leave at checkpoints.

    python examples/elastic_training.py

This process runs the seed and starts two ranks, then a third one, which joins after 20 steps. After 40 steps the oldest
rank leaves. A joiner receives the model, its momentum and the step. Each batch is divided among the current ranks.
"""

import os
import subprocess
import sys

import numpy as np

import nexar

WEIGHTS = np.linspace(-1, 1, 50)  # the weights to find
BATCH, RATE, MOMENTUM = 600, 0.01, 0.8
EACH_PART = 20  # steps with two ranks, then with three, then with two again


class Training:
    """The training state that a joiner needs."""

    def __init__(self, state: dict[str, object] | None) -> None:
        self.model = np.zeros_like(WEIGHTS)
        self.velocity = np.zeros_like(WEIGHTS)
        self.step = 0
        self.__dict__.update(state or {})

    def state(self) -> dict[str, object]:
        """The state to send to a joiner."""
        return dict(self.__dict__)

    def advance(self, comm: nexar.Communicator) -> float:
        """Make one step on all ranks, and return the loss before it."""
        random = np.random.default_rng(self.step)  # the same batch on every rank
        x = random.normal(size=(BATCH, len(WEIGHTS)))
        y = x @ WEIGHTS + random.normal(0, 0.1, BATCH)
        mine = slice(comm.rank, None, comm.size)  # the share of this rank
        error = x[mine] @ self.model - y[mine]
        *gradient, loss = comm.all_reduce(np.append(x[mine].T @ error, error @ error)) / BATCH
        self.velocity = MOMENTUM * self.velocity - RATE * np.array(gradient)
        self.model += self.velocity
        self.step += 1
        return float(loss)


def next_communicator(comm: nexar.Communicator, training: Training, *, oldest: bool) -> nexar.Communicator | None:
    """Let a rank join or leave; return the next communicator, or None if this rank leaves."""
    if comm.epoch == 1:
        change = comm.grow(1, state=training.state)  # a checkpoint that waits until one rank has joined
    else:
        if oldest:
            comm.leave()  # takes effect at the checkpoint
        change = comm.checkpoint(state=training.state)
    return change.communicator


def work() -> None:
    """Run one rank."""
    comm = nexar.init()
    training, oldest = Training(comm.state), comm.epoch == 1 and comm.rank == 0
    if comm.state is not None:
        print(f"joined as rank {comm.rank} of {comm.size} after step {training.step}", flush=True)
    while True:
        for _ in range(EACH_PART):
            loss = training.advance(comm)
        if comm.rank == 0:
            print(f"step {training.step}: {comm.size} ranks, loss {loss:.4f}", flush=True)
        if comm.epoch == 3:
            break
        following = next_communicator(comm, training, oldest=oldest)
        if following is None:
            print(f"leaving after step {training.step}", flush=True)
            return
        comm = following
    models = comm.all_gather(training.model)
    if comm.rank == 0:
        print(f"same model on all {comm.size} ranks: {bool((models == training.model).all())}", flush=True)
    comm.close()


def main() -> None:
    """Run the seed and three ranks; the third starts later."""
    with nexar.Seed("127.0.0.1:0", 2, config=nexar.Config(elastic_enabled=True)) as seed:
        command = [sys.executable, __file__, "work"]
        environment = {**os.environ, "NEXAR_TICKET": seed.ticket, "NEXAR_ELASTIC_ENABLED": "true"}
        ranks = [subprocess.Popen(command, env=environment) for _ in range(2)]
        seed.wait_formed()
        ranks.append(subprocess.Popen(command, env=environment))
        assert [rank.wait() for rank in ranks] == [0, 0, 0]


if __name__ == "__main__":
    work() if sys.argv[1:] == ["work"] else main()
