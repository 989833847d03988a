"""A launcher at a seed, over real sockets to a seed of this process."""

import pytest

from nexar.cluster.attendant import Attendant
from nexar.cluster.seed import Seed
from nexar.config import Config
from nexar.errors import JoinRefused, SeedUnreachable
from nexar.security.invitation import Invitation
from nexar.security.join_ticket import parse_ticket
from tests.cluster.guests import wait_for_event

HERE = "127.0.0.1:0"
CONFIG = Config(transports=("shm", "tls"), formation_timeout=10)


def test_it_holds_a_block_of_ranks_as_long_as_it_is_open() -> None:
    with Seed(HERE, 4, transports=("tls",)) as seed:
        invitation = parse_ticket(seed.ticket)
        with Attendant(invitation, 2, CONFIG) as one, Attendant(invitation, 2, CONFIG) as other:
            assert sorted([(one.first_rank, one.group_rank), (other.first_rank, other.group_rank)]) == [(0, 0), (2, 1)]
            assert (one.size, other.size) == (4, 4)
            assert one.node != other.node
            with pytest.raises(JoinRefused):
                Attendant(invitation, 1, CONFIG)
        with Attendant(invitation, 4, CONFIG) as all_of_them:  # what was given back can be had again
            assert all_of_them.first_rank == 0


def test_it_gets_the_block_it_asks_for() -> None:
    with Seed(HERE, 4, transports=("tls",)) as seed, Attendant(parse_ticket(seed.ticket), 2, CONFIG, 2) as attendant:
        assert attendant.first_rank == 2


def test_it_reports_the_death_of_a_child_and_does_not_mind_a_seed_that_is_gone() -> None:
    with Seed(HERE, 2, transports=("tls",)) as seed:
        attendant = Attendant(parse_ticket(seed.ticket), 2, CONFIG)
        attendant.report(attendant.first_rank, "killed by signal 9")
        wait_for_event(seed, "child died", "signal 9")
    attendant.report(attendant.first_rank, "killed by signal 11")
    attendant.close()
    attendant.close()


def test_a_seed_that_is_not_there_leaves_nothing_open() -> None:
    with Seed(HERE, 1, transports=("tls",)) as seed:
        address = seed.address
    with pytest.raises(SeedUnreachable):
        Attendant(Invitation((address,), bytes(32), None), 1, Config(transports=("tls",), formation_timeout=0.2))
