"""Communicators of one process, over each transport: by real sockets and segments where it has them."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from nexar.cluster.seed import Seed
from nexar.communicator.bootstrap import bootstrap
from nexar.communicator.communicator import Communicator
from nexar.communicator.local import local_communicators
from nexar.config import Config
from nexar.security.join_ticket import parse_ticket
from nexar.testing.availability import why_absent
from tests.ranks import on_every

SCHEMES = ("memory", "shm", "tls", "quic")


@contextmanager
def ranks_over(scheme: str, size: int, **settings: object) -> Iterator[list[Communicator]]:
    """One communicator for each rank, in order. Ranks of `shm` have TLS beside it, which forms the cluster."""
    reason = why_absent(scheme) if scheme != "memory" else None
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
        seed = undo.enter_context(Seed("127.0.0.1:0", size, transports=network))
        invitation = parse_ticket(seed.ticket)
        for comm in on_every(range(size), lambda rank: bootstrap(config, invitation, rank=rank)):
            undo.callback(comm.close)
            made = [*made, comm] if comm.rank else [comm]
        yield made
