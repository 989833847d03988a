"""A rank that the system refuses memory: a message waits with its sender, and only the call that needs memory fails."""

import resource
from functools import partial

import numpy as np
import pytest

from nexar.communicator.communicator import Communicator
from nexar.launch.spawn import spawn
from tests.processes.scale import MIB, schemes

LARGE = 256 * MIB
SPARE = 96 * MIB  # less than the message, enough for all else
SECONDS = 120.0


def address_space() -> int:
    with open("/proc/self/statm") as facts:
        return int(facts.read().split()[0]) * resource.getpagesize()


def talk(comm: Communicator, *, verb: str) -> str:
    """Rank 1 has no memory for what rank 0 sends, and gets some later."""
    if comm.rank == 0:
        array = np.arange(LARGE // 8)
        send = comm.start.send if verb == "array" else comm.start.send_object
        sending = send(array, 1, timeout=SECONDS)
        comm.send(1, 1, tag=2)  # behind it
        assert int(comm.recv(source=1, tag=3, timeout=SECONDS)) == 2
        sending.wait(SECONDS)
        return "sent"
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (address_space() + SPARE, before[1]))
    receive = comm.recv if verb == "array" else comm.recv_object
    assert int(comm.recv(source=0, tag=2, timeout=SECONDS)) == 1  # the rank lives, and others' messages arrive
    with pytest.raises(MemoryError):
        receive(source=0, timeout=SECONDS)
    comm.send(2, 0, tag=3)
    resource.setrlimit(resource.RLIMIT_AS, before)
    array = receive(source=0, timeout=SECONDS)
    assert array[0] == 0
    assert array[-1] == LARGE // 8 - 1
    return "received"


@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("verb", ["array", "object"])
@schemes("quic", "tls", "shm")
def test_a_message_for_which_a_rank_has_no_memory_waits_with_its_sender(scheme: str, verb: str) -> None:
    transports = ("shm", "tls") if scheme == "shm" else (scheme,)
    assert spawn(partial(talk, verb=verb), 2, transports=transports) == ["sent", "received"]
