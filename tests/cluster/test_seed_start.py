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
from tests.cluster.joiners import Knocker, Line

HERE = "127.0.0.1:0"


def two_members(seed: SeedService, knocker: Knocker, first: int = 7) -> list[Line]:
    """Two lines that have heard of the commit."""
    lines = [knocker.knock(seed, node) for node in (first, first + 1)]
    for rank, line in enumerate(lines):
        line.join(rank=rank, confirms=True)
    for line in lines:
        line.hear_membership()
    return lines


def test_members_hear_that_the_cluster_has_started_when_all_are_connected(knocker: Knocker) -> None:
    with SeedService(HERE, 2) as seed:
        lines = two_members(seed, knocker)
        lines[0].send(Connected())
        assert seed.membership is None, "it has formed when it has started"
        lines[1].send(Connected())
        for line in lines:
            line.hear(Started)
        assert seed.wait_formed(20).size == 2


def test_who_waits_for_the_formation_hears_that_it_has_failed_after_the_commit(knocker: Knocker) -> None:
    with SeedService(HERE, 2) as seed:
        lines = two_members(seed, knocker)
        lines[0].send(Connected())
        lines[1].send(StartFailed("rank 1 cannot connect to rank 0"))
        for line in lines:
            assert line.hear(FormationFailed).reason == "rank 1 cannot connect to rank 0"
        with pytest.raises(FormationTimeout, match="rank 1 cannot connect to rank 0"):
            seed.wait_formed(20)
        assert seed.wait_empty(20)


def test_a_membership_that_did_not_start_is_not_found_by_the_next_seed(knocker: Knocker, tmp_path: Path) -> None:
    with SeedService(HERE, 2, state_dir=tmp_path) as seed:
        lines = two_members(seed, knocker)
        lines[1].carrier.abort("killed")
        lines[0].hear(MemberDied)
        assert "rank 1 was lost" in lines[0].hear(FormationFailed).reason
        with pytest.raises(FormationTimeout):
            seed.wait_formed(20)
    with SeedService(HERE, 2, state_dir=tmp_path) as seed:
        assert seed.membership is None
        for line in two_members(seed, knocker, 17):
            line.send(Connected())
        assert seed.wait_formed(20).size == 2


def test_a_candidate_is_told_who_is_missing_when_it_asks(knocker: Knocker) -> None:
    with SeedService(HERE, 3) as seed:
        line = knocker.knock(seed, 7)
        line.apply(rank=1)
        line.hear(Welcome)
        line.send(Ready())
        line.send(FormationQuery())
        progress = line.hear(FormationProgress)
        assert (progress.joined, progress.expected, progress.missing) == (1, 3, (0, 2))
