"""DDP training that continues after the loss of a rank and after a new rank joins.

    python examples/torch_elastic.py

This process runs the seed and starts three ranks. The third kills itself at step 20. In the others `backward()` raises,
and they continue with two ranks. Then a new rank joins; it needs only the ticket.
"""

import io
import os
import signal
import subprocess
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import nexar
import nexar.torch

STEPS_TOGETHER = 20
"""Steps with three ranks after the new rank has joined."""
LAST_OF_THE_VICTIM = 20


class Training:
    """The training of one rank: the model and the current step."""

    def __init__(self, comm: nexar.Communicator) -> None:
        torch.manual_seed(0)
        self.comm = comm
        self.model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
        self.step = self.together = 0
        if comm.state is not None:
            self.model.load_state_dict(torch.load(io.BytesIO(comm.state["model"])))
            self.step = comm.state["step"]
            print(f"joined as rank {comm.rank} of {comm.size}, at step {self.step}", flush=True)

    def state(self) -> dict[str, Any]:
        """The state to send to a joiner."""
        buffer = io.BytesIO()
        torch.save(self.model.state_dict(), buffer)
        return {"model": buffer.getvalue(), "step": self.step}

    def run(self) -> None:
        """Train. After each membership change continue with the next communicator."""
        while self.together < STEPS_TOGETHER:
            nexar.torch.adopt(self.comm)
            try:
                self.comm = self.train()
            except nexar.MembershipChanged as change:
                if change.communicator.rank == 0:
                    print(f"step {self.step}: continuing without {dict(change.lost)}", flush=True)
                self.comm = change.communicator
            finally:
                dist.destroy_process_group()

    def train(self) -> nexar.Communicator:
        """Train until the membership changes or training is complete. Return the communicator to continue with."""
        # Some ranks may have made one more step than others before the interruption. DDP sends the model of rank 0 to
        # all ranks, and they take over its step too.
        model = DistributedDataParallel(self.model)
        self.step, self.together = self.comm.broadcast_object((self.step, self.together))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        while self.together < STEPS_TOGETHER:
            self.take_step(model, optimizer)
            change = self.comm.checkpoint(state=self.state)
            if change is not None:
                self.together = 1  # a rank has joined
                return change.communicator
        return self.comm

    def take_step(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Make one ordinary DDP step."""
        if os.environ.get("VICTIM") and self.step == LAST_OF_THE_VICTIM:
            os.kill(os.getpid(), signal.SIGKILL)
        data = torch.Generator().manual_seed(1000 * self.step + self.comm.rank)
        inputs = torch.randn(32, 16, generator=data)
        loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        self.step += 1
        self.together += self.together > 0
        if self.comm.rank == 0 and (self.step % 200 == 0 or self.together == STEPS_TOGETHER):
            print(f"step {self.step}: {self.comm.size} ranks, loss {loss.item():.3f}", flush=True)


def work() -> None:
    """Run one rank."""
    torch.set_num_threads(1)
    with nexar.init(elastic_enabled=True) as comm:
        Training(comm).run()


def main() -> None:
    """Run the seed and four ranks; one dies, and one starts later."""
    with nexar.Seed("127.0.0.1:0", 3, config=nexar.Config(elastic_enabled=True)) as seed:
        command = [sys.executable, __file__, "work"]
        environment = {**os.environ, "NEXAR_TICKET": seed.ticket}
        ranks = [subprocess.Popen(command, env=environment) for _ in range(2)]
        victim = subprocess.Popen(command, env={**environment, "VICTIM": "1"})
        assert victim.wait() == -signal.SIGKILL
        ranks.append(subprocess.Popen(command, env=environment))
        assert [rank.wait() for rank in ranks] == [0, 0, 0]


if __name__ == "__main__":
    work() if sys.argv[1:] == ["work"] else main()
