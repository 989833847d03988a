"""A rank that the system refuses memory: a message waits with its sender, and only the call that needs memory fails."""

import resource
from functools import partial

import numpy as np
import pytest

from nexar.communicator.communicator import Communicator
from nexar.launch.spawn import spawn
from tests.processes.scale import MIB, schemes

pytestmark = pytest.mark.full

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


COPIED = 64 * MIB  # there is room for the message, and not for a copy of it


def take_copied(comm: Communicator, *, verb: str) -> str:
    """Rank 1 has no memory for the value that it makes of the message, and gets some later."""
    value = bytes(range(256)) * (COPIED // 256)
    if comm.rank == 0:
        pickled = {} if verb == "bytes" else {"pickle": verb == "pickle"}
        (comm.send_bytes if verb == "bytes" else comm.send_object)(value, 1, timeout=SECONDS, **pickled)
        return "sent"
    comm.probe(source=0, timeout=SECONDS)
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (address_space() + SPARE, before[1]))
    for _ in range(2):
        with pytest.raises(MemoryError, match="it is kept"):
            _take(comm, verb)
    resource.setrlimit(resource.RLIMIT_AS, before)
    assert _take(comm, verb) == value
    return "received"


def _take(comm: Communicator, verb: str) -> object:
    if verb == "bytes":
        return comm.recv_bytes(source=0, timeout=SECONDS)
    return comm.recv_object(source=0, timeout=SECONDS, pickle=verb == "pickle")


@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("verb", ["bytes", "object", "pickle"])
def test_a_message_is_kept_if_there_is_no_memory_for_a_copy_of_it(verb: str) -> None:
    assert spawn(partial(take_copied, verb=verb), 2, transports=("tls",)) == ["sent", "received"]
