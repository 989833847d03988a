"""Measures torch.distributed with Gloo, as one rank: `python gloo.py SOCKET RANK SIZE STORE`.

Runs in the environment of `make bench-peers`, with nexar's benchmark code on PYTHONPATH.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
import torch.distributed as dist

from nexar.cli.bench.measuring import Unsupported, serve
from nexar.cli.bench.protocol import window

OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "prod": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}


class Gloo:
    """Gloo as a system to measure."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.version = f"torch {torch.__version__}"

    def barrier(self):
        dist.barrier()

    def bind(self, order, source, target):
        if order.algorithm is not None:
            raise Unsupported("Gloo does not let its algorithm be chosen")
        if order.measure == "barrier":
            return dist.barrier
        source, target = tensor(source), tensor(target)
        if order.measure == "p2p-latency":
            return self._ping(source, target)
        if order.measure == "p2p-bandwidth":
            return self._flood(source, target)
        return self._collective(order, source, target)

    def _collective(self, order, source, target):
        op, root, at_root = operation(order.op), order.root, self.rank == order.root
        parts = list(target.chunk(self.size)) if order.measure == "gather" and at_root else None
        shares = list(source.chunk(self.size)) if order.measure == "scatter" and at_root else None

        def reduce():
            # Gloo reduces in place and overwrites the other ranks' arrays; nexar preserves them.
            target.copy_(source)
            dist.reduce(target, dst=root, op=op)

        return {
            "all_reduce": lambda: dist.all_reduce(target, op=op),
            "all_gather": lambda: dist.all_gather_into_tensor(target, source),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(target, source, op=op),
            "broadcast": lambda: dist.broadcast(target, src=root),
            "reduce": reduce,
            "all_to_all": lambda: dist.all_to_all_single(target, source),
            "gather": lambda: dist.gather(source, parts, dst=root),
            "scatter": lambda: dist.scatter(target, shares, src=root),
        }[order.measure]

    def _ping(self, source, target):
        def ask():
            dist.send(source, dst=1)
            dist.recv(target, src=1)

        def answer():
            dist.recv(target, src=0)
            dist.send(target, dst=0)

        return ask if self.rank == 0 else answer

    def _flood(self, source, target):
        messages, done = range(window(source.nbytes)), source[:1].clone()

        def send():
            for work in [dist.isend(source, dst=1) for _ in messages]:
                work.wait()
            dist.recv(done, src=1)

        def receive():
            for work in [dist.irecv(target, src=0) for _ in messages]:
                work.wait()
            dist.send(done, dst=0)

        return send if self.rank == 0 else receive


def tensor(array):
    """The same memory as a tensor."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        raise Unsupported(f"torch has no {array.dtype} from NumPy") from error


def operation(name):
    """The torch operation of this name."""
    if name not in OPERATIONS:
        raise Unsupported(f"Gloo does not reduce by {name}")
    return OPERATIONS[name]


def main() -> None:
    """Runs one rank."""
    path, rank, size, store = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(size))
    try:
        serve(Gloo(), path)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
