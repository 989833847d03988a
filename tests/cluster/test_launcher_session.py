"""A launcher at a seed, over real sockets to a seed of this process."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from nexar.cluster.seed import SeedService
from nexar.cluster.seed_session import LauncherSession
from nexar.config import Config
from nexar.errors import JoinRefused, SeedUnreachable
from nexar.security.invitation import Invitation, parse_ticket
from tests.cluster.joiners import EVENT_TIMEOUT, join_dialer, wait_for_event

HERE = "127.0.0.1:0"
CONFIG = Config(transports=("shm", "tls"), formation_timeout=10)


def test_it_holds_a_block_of_ranks_as_long_as_it_is_open() -> None:
    with SeedService(HERE, 4, transports=("tls",)) as seed:
        invitation = parse_ticket(seed.ticket)
        with LauncherSession(invitation, 2, CONFIG) as one, LauncherSession(invitation, 2, CONFIG) as other:
            assert sorted([(one.first_rank, one.group_rank), (other.first_rank, other.group_rank)]) == [(0, 0), (2, 1)]
            assert (one.size, other.size) == (4, 4)
            assert one.node != other.node
            with pytest.raises(JoinRefused):
                LauncherSession(invitation, 1, CONFIG)
        with LauncherSession(invitation, 4, CONFIG) as all_of_them:  # what was given back can be had again
            assert all_of_them.first_rank == 0


def test_it_gets_the_block_it_asks_for() -> None:
    with (
        SeedService(HERE, 4, transports=("tls",)) as seed,
        LauncherSession(parse_ticket(seed.ticket), 2, CONFIG, 2) as session,
    ):
        assert session.first_rank == 2


def test_it_reports_the_death_of_a_child_and_does_not_mind_a_seed_that_is_gone() -> None:
    with SeedService(HERE, 2, transports=("tls",)) as seed:
        session = LauncherSession(parse_ticket(seed.ticket), 2, CONFIG)
        session.report(0, "killed by signal 9")
        wait_for_event(seed, "child died", "signal 9")
    session.report(0, "killed by signal 11")
    session.close()
    session.close()


def test_a_seed_that_is_not_there_leaves_nothing_open() -> None:
    with SeedService(HERE, 1, transports=("tls",)) as seed:
        address = seed.address
    with pytest.raises(SeedUnreachable):
        LauncherSession(Invitation((address,), bytes(32), None), 1, Config(transports=("tls",), formation_timeout=0.2))


def test_it_comes_back_to_a_seed_that_was_started_again_and_reports_what_it_could_not(tmp_path: Path) -> None:
    def open_seed() -> SeedService:
        return SeedService(HERE, 2, state_dir=tmp_path, transports=("tls",))

    with ExitStack() as stack:
        dialer = stack.enter_context(join_dialer("tls"))
        with open_seed() as seed:
            session = stack.enter_context(LauncherSession(parse_ticket(seed.ticket), 2, CONFIG))
            assert not session.formed
            lines = [dialer.dial(seed, 7 + rank) for rank in (0, 1)]
            for rank, line in enumerate(lines):
                line.join(rank=rank, launcher=session.node)
            seed.wait_formed(20)
            await_that(lambda: session.formed)
        session.report(1, "killed by signal 9")
        with open_seed() as seed:
            wait_for_event(seed, "returned")
            wait_for_event(seed, "child died", "signal 9")


def test_before_the_cluster_has_formed_it_gets_the_same_block_from_a_seed_that_began_anew(tmp_path: Path) -> None:
    with SeedService(HERE, 4, state_dir=tmp_path, transports=("tls",)) as seed:
        invitation = parse_ticket(seed.ticket)
        with LauncherSession(invitation, 1, CONFIG), LauncherSession(invitation, 2, CONFIG) as session:
            assert session.first_rank == 1
            seed.close()
            with SeedService(HERE, 4, state_dir=tmp_path, transports=("tls",)) as again:
                wait_for_event(again, "reserved", "ranks 1..2")


def test_in_an_elastic_cluster_that_has_formed_it_has_no_ranks() -> None:
    with SeedService(HERE, 1, transports=("tls",), elastic_enabled=True) as seed, join_dialer("tls") as dialer:
        dialer.dial(seed, 7).join()
        seed.wait_formed(20)
        with LauncherSession(parse_ticket(seed.ticket), 2, CONFIG) as session:
            assert (session.first_rank, session.group_rank) == (None, None)
            await_that(lambda: session.formed)


def await_that(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + EVENT_TIMEOUT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
