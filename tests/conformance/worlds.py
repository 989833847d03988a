"""Communicators of one process, over each transport: by real sockets and segments where it has them.

NEXAR_TOPOLOGY runs everything that uses them on a sparse topology, NEXAR_ENABLE_TCP_BULK_SIDECAR with the sidecar or
without. Ranks that are given to a test are then no neighbours of one another: all that they say is relayed.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from nexar.cluster.seed import SeedService
from nexar.communicator.bootstrap import bootstrap
from nexar.communicator.communicator import Communicator
from nexar.communicator.local import local_communicators
from nexar.config import Config
from nexar.security.invitation import parse_ticket
from nexar.topology import degree_of
from nexar_tools.transports import why_unavailable
from tests.conformance.transports import CASES
from tests.ranks import on_every

SCHEMES = tuple(name for name, case in CASES.items() if case.forms_clusters)
TOPOLOGY = os.environ.get("NEXAR_TOPOLOGY") or "full_mesh"
SIDECAR: dict[str, object] = (
    {"enable_tcp_bulk_sidecar": value == "true"} if (value := os.environ.get("NEXAR_ENABLE_TCP_BULK_SIDECAR")) else {}
)


def apart(topology: str, size: int) -> tuple[int, list[int]]:
    """A world, and so many of its ranks of which no two are neighbours."""
    if topology == "hypercube":  # corners that differ in two bits at least
        ranks = [rank for rank in range(4 * size) if rank.bit_count() % 2 == 0][:size]
        return max(4, 1 << ranks[-1].bit_length()), ranks
    step = degree_of(topology) // 2 + 1
    return max(2, size) * step, [step * place for place in range(size)]


@contextmanager
def ranks_over(scheme: str, size: int, **settings: object) -> Iterator[list[Communicator]]:
    """One communicator for each rank, in order. Ranks of `shm` have TLS beside it, which forms the cluster."""
    settings = {"topology": TOPOLOGY, **SIDECAR, **settings}
    topology = str(settings["topology"])
    if topology == "full_mesh" or size == 1:
        with world_over(scheme, size, **settings) as made:
            yield made
        return
    many, ranks = apart(topology, size)
    with world_over(scheme, many, **settings) as world:
        parts = on_every(world, lambda comm: comm.group(ranks))
        yield [part for part in parts if part is not None]


@contextmanager
def world_over(scheme: str, size: int, **settings: object) -> Iterator[list[Communicator]]:
    """The whole world, in which ranks may be neighbours."""
    reason = why_unavailable(scheme) if scheme != "memory" else None
    if reason is not None:
        pytest.skip(f"{scheme}: {reason}")
    if scheme == "memory":
        with local_communicators(size, Config(**settings)) as made:  # type: ignore[arg-type]
            yield made
        return
    transports = ("shm", "tls") if scheme == "shm" else (scheme,)
    config = Config(transports=transports, bind="127.0.0.1", **settings)  # type: ignore[arg-type]
    with ExitStack() as undo:
        network = tuple(each for each in transports if each != "shm")
        seed = undo.enter_context(SeedService("127.0.0.1:0", size, transports=network))
        invitation = parse_ticket(seed.ticket)
        for comm in on_every(range(size), lambda rank: bootstrap(config, invitation, rank=rank)):
            undo.callback(comm.close)
            made = [*made, comm] if comm.rank else [comm]
        yield made
