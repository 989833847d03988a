"""Two ranks compute; a third one joins while they run, with the state that they have by then.

    python examples/grow_while_running.py

This process opens the door (a seed) and starts the ranks; each of them runs `work`. The third is started later, as
anybody could on any machine, with nothing but the ticket.
"""

import os
import subprocess
import sys

import numpy as np

import nexar

STEPS_TOGETHER = 3


def work() -> None:
    """What each rank does: add what all bring to the model, step by step; at each step somebody may come in."""
    comm = nexar.init(elastic_enabled=True)
    model, step, together = np.zeros(4), 0, 0
    if comm.state is not None:
        model, step = comm.state["model"], comm.state["step"]
        print(f"I have joined as rank {comm.rank} of {comm.size}, at step {step}, with the model {model}", flush=True)
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
    """The seed and three processes, one of them late."""
    with nexar.Seed("127.0.0.1:0", 2, config=nexar.Config(elastic_enabled=True)) as seed:
        command = [sys.executable, __file__, "work"]
        environment = {**os.environ, "NEXAR_TICKET": seed.ticket}
        ranks = [subprocess.Popen(command, env=environment) for _ in range(2)]
        seed.wait_formed()
        ranks.append(subprocess.Popen(command, env=environment))
        assert [rank.wait() for rank in ranks] == [0, 0, 0]


if __name__ == "__main__":
    work() if sys.argv[1:] == ["work"] else main()
