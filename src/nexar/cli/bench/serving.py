"""A rank's side of its line: say hello, then measure what is ordered, until the other end hangs up.

A rank with nothing to do sleeps in a read here; libraries that wait by spinning would otherwise take a core from the
system whose turn it is. No deadline: the end of the command, however it ends, is the end of the line.
"""

from __future__ import annotations

import socket

from nexar.cli.bench.measuring import System, measure
from nexar.cli.bench.order import Hello, parse_order


def serve(system: System, path: str) -> None:
    """Measure for the command that listens at this Unix socket; returns when it has hung up."""
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(path)
        line.sendall(Hello(rank=system.rank, version=system.version).line())
        with line.makefile("rb") as orders:
            for order in orders:
                line.sendall(measure(system, parse_order(order)).line())
