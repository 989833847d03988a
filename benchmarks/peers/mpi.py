"""Measures an MPI library, as one rank: `mpiexec -n N python mpi.py SOCKET`.

Runs in the environment of `make bench-peers`, with nexar's benchmark code on PYTHONPATH.
"""

from __future__ import annotations

import sys

from mpi4py import MPI

from nexar.cli.bench.measuring import Unsupported, serve
from nexar.cli.bench.protocol import window

OPERATIONS = {
    "sum": MPI.SUM,
    "prod": MPI.PROD,
    "min": MPI.MIN,
    "max": MPI.MAX,
    "band": MPI.BAND,
    "bor": MPI.BOR,
    "bxor": MPI.BXOR,
    "land": MPI.LAND,
    "lor": MPI.LOR,
    "lxor": MPI.LXOR,
}


class Mpi:
    """An MPI library as a system to measure."""

    def __init__(self) -> None:
        self._comm = MPI.COMM_WORLD
        self.rank = self._comm.rank
        self.size = self._comm.size
        vendor, number = MPI.get_vendor()
        self.version = f"{vendor} {'.'.join(map(str, number))}"

    def barrier(self):
        self._comm.Barrier()

    def bind(self, order, source, target):
        if order.algorithm is not None:
            raise Unsupported("MPI does not let its algorithm be chosen")
        if order.op not in OPERATIONS:
            raise Unsupported(f"MPI does not reduce by {order.op}")
        if source.dtype.char not in MPI._typedict:
            raise Unsupported(f"MPI has no {source.dtype}")
        if order.measure == "p2p-latency":
            return self._ping(source, target)
        if order.measure == "p2p-bandwidth":
            return self._flood(source, target)
        return self._collective(order, source, target)

    def _collective(self, order, source, target):
        comm, op, root, at_root = self._comm, OPERATIONS[order.op], order.root, self.rank == order.root
        result, input_ = target if at_root else None, source if at_root else None
        return {
            "all_reduce": lambda: comm.Allreduce(MPI.IN_PLACE, target, op),
            "all_gather": lambda: comm.Allgather(source, target),
            "reduce_scatter": lambda: comm.Reduce_scatter_block(source, target, op),
            "broadcast": lambda: comm.Bcast(target, root),
            "reduce": lambda: comm.Reduce(source, result, op, root),
            "all_to_all": lambda: comm.Alltoall(source, target),
            "gather": lambda: comm.Gather(source, result, root),
            "scatter": lambda: comm.Scatter(input_, target, root),
            "barrier": comm.Barrier,
        }[order.measure]

    def _ping(self, source, target):
        comm = self._comm

        def ask():
            comm.Send(source, 1)
            comm.Recv(target, 1)

        def answer():
            comm.Recv(target, 0)
            comm.Send(target, 0)

        return ask if self.rank == 0 else answer

    def _flood(self, source, target):
        comm, messages, done = self._comm, range(window(source.nbytes)), source[:1].copy()

        def send():
            MPI.Request.Waitall([comm.Isend(source, 1) for _ in messages])
            comm.Recv(done, 1)

        def receive():
            MPI.Request.Waitall([comm.Irecv(target, 0) for _ in messages])
            comm.Send(done, 0)

        return send if self.rank == 0 else receive


if __name__ == "__main__":
    serve(Mpi(), sys.argv[1])
