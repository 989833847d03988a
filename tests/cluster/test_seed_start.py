"""A seed and the members of its first membership: all of them start, or none does."""

from pathlib import Path

import pytest

from nexar.cluster.seed import SeedService
from nexar.errors import FormationTimeout
from nexar.wire.join import (
    Connected,
    FormationFailed,
    FormationProgress,
    FormationQuery,
    MemberDied,
    Ready,
    Started,
    StartFailed,
    Welcome,
)
from tests.cluster.joiners import JoinDialer, Line

HERE = "127.0.0.1:0"


def two_members(seed: SeedService, dialer: JoinDialer, first: int = 7) -> list[Line]:
    """Two lines that have learned of the commit."""
    lines = [dialer.dial(seed, node) for node in (first, first + 1)]
    for rank, line in enumerate(lines):
        line.join(rank=rank, confirms=True)
    for line in lines:
        line.receive_membership()
    return lines


def test_members_learn_that_the_cluster_has_started_when_all_are_connected(dialer: JoinDialer) -> None:
    with SeedService(HERE, 2) as seed:
        lines = two_members(seed, dialer)
        lines[0].send(Connected())
        assert seed.membership is None, "it has formed when it has started"
        lines[1].send(Connected())
        for line in lines:
            line.receive(Started)
        assert seed.wait_formed(20).size == 2


def test_who_waits_for_the_formation_learns_that_it_has_failed_after_the_commit(dialer: JoinDialer) -> None:
    with SeedService(HERE, 2) as seed:
        lines = two_members(seed, dialer)
        lines[0].send(Connected())
        lines[1].send(StartFailed("rank 1 cannot connect to rank 0"))
        for line in lines:
            assert line.receive(FormationFailed).reason == "rank 1 cannot connect to rank 0"
        with pytest.raises(FormationTimeout, match="rank 1 cannot connect to rank 0"):
            seed.wait_formed(20)
        assert seed.wait_empty(20)


def test_a_membership_that_did_not_start_is_not_found_by_the_next_seed(dialer: JoinDialer, tmp_path: Path) -> None:
    with SeedService(HERE, 2, state_dir=tmp_path) as seed:
        lines = two_members(seed, dialer)
        lines[1].carrier.abort("killed")
        lines[0].receive(MemberDied)
        assert "rank 1 was lost" in lines[0].receive(FormationFailed).reason
        with pytest.raises(FormationTimeout):
            seed.wait_formed(20)
    with SeedService(HERE, 2, state_dir=tmp_path) as seed:
        assert seed.membership is None
        for line in two_members(seed, dialer, 17):
            line.send(Connected())
        assert seed.wait_formed(20).size == 2


def test_a_candidate_is_notified_who_is_missing_when_it_asks(dialer: JoinDialer) -> None:
    with SeedService(HERE, 3) as seed:
        line = dialer.dial(seed, 7)
        line.apply(rank=1)
        line.receive(Welcome)
        line.send(Ready())
        line.send(FormationQuery())
        progress = line.receive(FormationProgress)
        assert (progress.joined, progress.expected, progress.missing) == (1, 3, (0, 2))
