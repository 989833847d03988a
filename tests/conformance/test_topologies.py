"""Everything works on every topology: collectives in worlds where most ranks are no neighbours, messages and remote
calls between ranks of which no two are. NEXAR_FULL=1 does it at every size; NEXAR_TOPOLOGY runs the other suites so.
"""

from functools import partial
from typing import Any

import numpy as np
import pytest

import nexar
from nexar.communicator.communicator import Communicator
from nexar.communicator.local import local_communicators
from nexar.config import Config
from nexar.links.carrier_selection import is_relayed
from nexar.topology import neighbors
from tests.conformance.collectives.cases import every_algorithm, every_verb, run_cases, wrong_results
from tests.conformance.worlds import ranks_over, world_over
from tests.processes.scale import Report, sized
from tests.ranks import EVENT_TIMEOUT, on_every

TOPOLOGIES = ("k_regular:2", "k_regular:4", "hypercube")
WORLDS = sized((5, 9), tuple(range(2, 10)))
LARGE = 300_000


def on_each_topology(*schemes: str) -> pytest.MarkDecorator:
    """On one by one over one transport each, or, in full, over all of them."""
    few = [(topology, schemes[number % len(schemes)]) for number, topology in enumerate(TOPOLOGIES)]
    every = [(topology, scheme) for topology in TOPOLOGIES for scheme in ("memory", "shm", "tls", "quic")]
    return pytest.mark.parametrize(("topology", "scheme"), sized(few, every))


@pytest.mark.full
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("size", WORLDS)
def test_every_verb_and_every_algorithm_is_right(topology: str, size: int) -> None:
    config = Config(
        topology=topology, collective_timeout=EVENT_TIMEOUT, barrier_timeout=EVENT_TIMEOUT, large_msg_bytes=4096
    )
    cases = [*every_verb(size, [0, size + 1, 997], ("float32",)), *every_algorithm(size, [997])]
    with local_communicators(size, config) as world:
        assert wrong_results(cases, on_every(world, partial(run_cases, cases=cases))) == []


def double(value: Any) -> Any:
    return value * 2


def fail() -> None:
    raise ValueError("on purpose")


@on_each_topology("tls", "quic", "shm")
@pytest.mark.parametrize("sidecar", sized((True,), (True, False)))
def test_messages_of_all_sizes_arrive_between_ranks_that_are_no_neighbours(
    topology: str, scheme: str, sidecar: bool
) -> None:
    with ranks_over(scheme, 2, topology=topology, enable_tcp_bulk_sidecar=sidecar) as pair:

        def talk(comm: Communicator) -> bool:
            other = 1 - comm.rank
            for count in (0, 1, 1000, LARGE):
                sent = np.arange(count, dtype=np.float64) + comm.rank
                going = comm.start.send(sent, other, tag=count)
                got = comm.recv(source=other, tag=count)
                going.wait()
                assert np.array_equal(got, np.arange(count, dtype=np.float64) + other)
            for number in range(200):
                comm.send(np.array([number]), other)
            return [int(comm.recv(source=other)[0]) for _ in range(200)] == list(range(200))

        assert on_every(pair, talk) == [True, True]
        assert all(is_relayed(link.schemes) for comm in pair for link in comm._group.links().values())


@on_each_topology("memory", "tls", "memory")
def test_functions_of_ranks_that_are_no_neighbours_are_called(topology: str, scheme: str) -> None:
    with ranks_over(scheme, 3, topology=topology) as ranks:
        for comm in ranks:
            comm.serve(double)
            comm.serve(fail)

        def call(comm: Communicator) -> bool:
            far = (comm.rank + 1) % 3
            assert comm.on(far).double(21) == 42
            values = np.arange(LARGE, dtype=np.float32)
            assert np.array_equal(comm.on(far).double(values), values * 2)
            with pytest.raises(nexar.RemoteError, match="on purpose"):
                comm.on(far).fail()
            comm.barrier()
            return True

        assert on_every(ranks, call) == [True] * 3


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_parts_of_a_world_work_beside_one_another(topology: str) -> None:
    def run(comm: Communicator) -> float:
        part = comm.split(color=comm.rank % 2)
        assert part is not None
        total = part.all_reduce(float(comm.rank))
        comm.barrier()
        return total

    with world_over("memory", 7, topology=topology) as world:
        assert on_every(world, run) == [12.0 if rank % 2 == 0 else 9.0 for rank in range(7)]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_rank_has_connections_to_its_neighbours_alone(topology: str) -> None:
    size = 9
    with world_over("memory", size, topology=topology) as world:
        on_every(world, lambda comm: comm.all_to_all(np.arange(size)))
        for comm in world:
            links = comm._group.links()
            straight = {rank for rank, link in links.items() if not is_relayed(link.schemes)}
            assert straight <= set(neighbors(topology, size, comm.rank)) == set(comm.neighbors)
            assert len(links) == size - 1
            assert comm.stats()["relay"]["shortcuts"] == 0
        assert sum(comm.stats()["relay"]["passed_on"] for comm in world) > 0


def test_sixty_four_ranks_on_a_cube_have_six_connections_each(record_property: Report) -> None:
    with local_communicators(sized(16, 64), Config(topology="hypercube", collective_timeout=EVENT_TIMEOUT)) as world:
        assert on_every(world, lambda comm: comm.all_reduce(1.0)) == [float(len(world))] * len(world)
        on_every(world, lambda comm: comm.all_to_all(np.arange(len(world))))
        counts = [sum(not is_relayed(link.schemes) for link in comm._group.links().values()) for comm in world]
    record_property("links", max(counts))
    assert max(counts) <= sized(4, 6)
