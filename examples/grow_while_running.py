"""Two ranks compute; a third one joins while they run and receives their state.

    python examples/grow_while_running.py

This process runs the seed and starts the ranks. Each rank runs `work`. The third rank starts later and needs only the
ticket, so it could run on any host.
"""

import os
import subprocess
import sys

import numpy as np

import nexar

STEPS_TOGETHER = 3


def work() -> None:
    """Run one rank: add the arrays of all ranks to the model. A rank may join at the end of each step."""
    comm = nexar.init(elastic_enabled=True)
    model, step, together = np.zeros(4), 0, 0
    if comm.state is not None:
        model, step = comm.state["model"], comm.state["step"]
        print(f"joined as rank {comm.rank} of {comm.size}, at step {step}, with the model {model}", flush=True)
    while together < STEPS_TOGETHER:
        model += comm.all_reduce(np.ones(4))
        step += 1
        together += comm.size == 3
        if comm.rank == 0 and (step == 1 or together):
            print(f"step {step}: {comm.size} ranks, model {model}", flush=True)
        change = comm.checkpoint(state=lambda: {"model": model, "step": step})  # noqa: B023 - called before it returns
        if change is not None:
            comm = change.communicator
    comm.close()


def main() -> None:
    """Run the seed and three ranks; the third starts later."""
    with nexar.Seed("127.0.0.1:0", 2, config=nexar.Config(elastic_enabled=True)) as seed:
        command = [sys.executable, __file__, "work"]
        environment = {**os.environ, "NEXAR_TICKET": seed.ticket}
        ranks = [subprocess.Popen(command, env=environment) for _ in range(2)]
        seed.wait_formed()
        ranks.append(subprocess.Popen(command, env=environment))
        assert [rank.wait() for rank in ranks] == [0, 0, 0]


if __name__ == "__main__":
    work() if sys.argv[1:] == ["work"] else main()
