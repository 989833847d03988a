"""Training goes on while ranks come and go, each at a checkpoint, with the state that training has by then.

    python examples/elastic_training.py

This process opens the door (a seed) and starts two ranks; then a third, as anybody with the ticket could. It is let in
when the two have learned for a while. Later the rank that has been there the longest leaves. The model, its momentum
and the number of the step pass on, so nothing is learned twice; each batch is shared out among whoever is there.
"""

import os
import subprocess
import sys

import numpy as np

import nexar

WEIGHTS = np.linspace(-1, 1, 50)  # what is to be found
BATCH, RATE, MOMENTUM = 600, 0.01, 0.8
EACH_PART = 20  # steps: of two ranks, then of three, then of two again


class Training:
    """All that a rank needs to go on where another one is."""

    def __init__(self, state: dict[str, object] | None) -> None:
        self.model = np.zeros_like(WEIGHTS)
        self.speed = np.zeros_like(WEIGHTS)
        self.step = 0
        self.__dict__.update(state or {})

    def state(self) -> dict[str, object]:
        """For who joins."""
        return dict(self.__dict__)

    def advance(self, comm: nexar.Communicator) -> float:
        """One step of everybody; the loss before it."""
        random = np.random.default_rng(self.step)  # the same batch on every rank ...
        x = random.normal(size=(BATCH, len(WEIGHTS)))
        y = x @ WEIGHTS + random.normal(0, 0.1, BATCH)
        mine = slice(comm.rank, None, comm.size)  # ... of which each takes its share
        error = x[mine] @ self.model - y[mine]
        *gradient, loss = comm.all_reduce(np.append(x[mine].T @ error, error @ error)) / BATCH
        self.speed = MOMENTUM * self.speed - RATE * np.array(gradient)
        self.model += self.speed
        self.step += 1
        return float(loss)


def next_communicator(comm: nexar.Communicator, training: Training, *, oldest: bool) -> nexar.Communicator | None:
    """What becomes of us between two parts; None if this rank leaves."""
    if comm.epoch == 1:
        change = comm.grow(1, state=training.state)  # a checkpoint that waits until one has come
    else:
        if oldest:
            comm.leave()  # at the next checkpoint, of which all know
        change = comm.checkpoint(state=training.state)
    return change.communicator


def work() -> None:
    """What each rank does."""
    comm = nexar.init()
    training, oldest = Training(comm.state), comm.epoch == 1 and comm.rank == 0
    if comm.state is not None:
        print(f"I have joined as rank {comm.rank} of {comm.size}, and go on after step {training.step}", flush=True)
    while True:
        for _ in range(EACH_PART):
            loss = training.advance(comm)
        if comm.rank == 0:
            print(f"step {training.step}: {comm.size} ranks, loss {loss:.4f}", flush=True)
        if comm.epoch == 3:
            break
        following = next_communicator(comm, training, oldest=oldest)
        if following is None:
            print(f"I leave after step {training.step}, and the others go on", flush=True)
            return
        comm = following
    same = comm.all_gather(training.model)
    if comm.rank == 0:
        print(f"the same model on all {comm.size} ranks: {bool((same == training.model).all())}", flush=True)
    comm.close()


def main() -> None:
    """The seed and three processes, one of them late."""
    with nexar.Seed("127.0.0.1:0", 2, config=nexar.Config(elastic_enabled=True)) as seed:
        command = [sys.executable, __file__, "work"]
        environment = {**os.environ, "NEXAR_TICKET": seed.ticket, "NEXAR_ELASTIC_ENABLED": "true"}
        ranks = [subprocess.Popen(command, env=environment) for _ in range(2)]
        seed.wait_formed()
        ranks.append(subprocess.Popen(command, env=environment))
        assert [rank.wait() for rank in ranks] == [0, 0, 0]


if __name__ == "__main__":
    work() if sys.argv[1:] == ["work"] else main()
