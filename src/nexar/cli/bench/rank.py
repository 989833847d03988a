"""A measuring rank: `python -m nexar.cli.bench.rank SOCKET`, started by `nexar run`."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Any

from numpy.typing import NDArray

from nexar.cli.bench.measuring import TimedCall, Unsupported, serve
from nexar.cli.bench.protocol import BenchOrder, window
from nexar.communicator.communicator import Communicator
from nexar.communicator.request import wait_all
from nexar.launch.init import init


class NexarSystem:
    """nexar as a `System`."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.rank = comm.rank
        self.size = comm.size
        self.version = version("nexar")

    def barrier(self) -> None:
        self._comm.barrier()

    def bind(self, order: BenchOrder, source: NDArray[Any], target: NDArray[Any]) -> TimedCall:
        if order.measure == "p2p-latency":
            return self._ping(source, target)
        if order.measure == "p2p-bandwidth":
            return self._flood(source, target)
        return self._collective(order, source, target)

    def _collective(self, order: BenchOrder, source: NDArray[Any], target: NDArray[Any]) -> TimedCall:
        comm, op, root = self._comm, order.op, order.root
        if order.measure == "scatter" and order.algorithm is not None:
            raise Unsupported("scatter has one algorithm")
        forced: dict[str, Any] = {} if order.algorithm is None else {"algorithm": order.algorithm}
        at_root = target if self.rank == root else None
        calls: dict[str, TimedCall] = {
            "all_reduce": lambda: comm.all_reduce(target, op=op, **forced),
            "all_gather": lambda: comm.all_gather(source, out=gathered, **forced),
            "reduce_scatter": lambda: comm.reduce_scatter(source, op=op, out=target, **forced),
            "broadcast": lambda: comm.broadcast(target, root=root, **forced),
            "reduce": lambda: comm.reduce(source, op=op, root=root, out=at_root, **forced),
            "all_to_all": lambda: comm.all_to_all(source, out=target, **forced),
            "gather": lambda: comm.gather(source, root=root, out=gathered if self.rank == root else None, **forced),
            "scatter": lambda: comm.scatter(source if self.rank == root else None, root=root, out=target),
            "barrier": lambda: comm.barrier(**forced),
        }
        gathered = target.reshape(self.size, -1) if order.measure in ("all_gather", "gather") else target
        return calls[order.measure]

    def _ping(self, source: NDArray[Any], target: NDArray[Any]) -> TimedCall:
        comm = self._comm

        def ask() -> None:
            comm.send(source, dest=1)
            comm.recv(target, source=1)

        def answer() -> None:
            comm.recv(target, source=0)
            comm.send(target, dest=0)

        return ask if self.rank == 0 else answer

    def _flood(self, source: NDArray[Any], target: NDArray[Any]) -> TimedCall:
        comm, messages, done = self._comm, range(window(source.nbytes)), source[:1].copy()
        start: Any = comm.start  # its methods are typed as the blocking ones

        def send() -> None:
            wait_all([start.send(source, dest=1) for _ in messages])
            comm.recv(done, source=1)

        def receive() -> None:
            wait_all([start.recv(target, source=0) for _ in messages])
            comm.send(done, dest=0)

        return send if self.rank == 0 else receive


def main() -> None:
    """Run one rank."""
    with init() as comm:
        serve(NexarSystem(comm), sys.argv[1])


if __name__ == "__main__":
    main()
