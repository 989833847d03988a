"""A seed with a state directory is the same one after a restart."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from nexar.cluster.seed import SeedService
from nexar.errors import UsageError
from nexar.wire.join import JoinRefusedMessage, Leave
from tests.cluster.joiners import JoinDialer, join_dialer, wait_for_event

HERE = "127.0.0.1:0"


@pytest.fixture
def dialer() -> Iterator[JoinDialer]:
    with join_dialer("tls") as made:
        yield made


def open_seed(state: Path, size: int | None = 2, listen: str = HERE, **settings: object) -> SeedService:
    return SeedService(listen, size, state_dir=state, transports=("tls",), **settings)


def test_before_the_cluster_has_formed_its_ticket_stays_and_forming_begins_again(
    tmp_path: Path, dialer: JoinDialer
) -> None:
    with open_seed(tmp_path) as seed:
        ticket, address = seed.ticket, seed.address
        waiting = dialer.dial(seed, 7)
        waiting.join()
    waiting.receive_end()  # and is not refused: it may try again
    with open_seed(tmp_path) as seed:
        assert (seed.ticket, seed.address, seed.membership) == (ticket, address, None)
        for node in (7, 8):
            dialer.dial(seed, node).join()
        assert seed.wait_formed(20).size == 2


def test_a_cluster_that_has_formed_is_known_again(tmp_path: Path, dialer: JoinDialer) -> None:
    with open_seed(tmp_path) as seed:
        lines = [dialer.dial(seed, node) for node in (7, 8)]
        for line in lines:
            line.join()
        membership, ticket = seed.wait_formed(20), seed.ticket
    with open_seed(tmp_path, None) as seed:
        assert (seed.ticket, seed.size) == (ticket, 2)
        assert seed.wait_formed(0) == seed.membership == membership
        assert not seed.wait_empty(0)  # they have time to come back
        unauthenticated = dialer.dial(seed, 9)
        unauthenticated.apply()
        assert "has formed with 2 members" in unauthenticated.receive(JoinRefusedMessage).reason
        for old in lines:
            back = dialer.dial(seed, old.node)
            back.key = old.key
            back.join()
            assert back.receive_membership() == membership
            back.send(Leave("done"))
        assert seed.wait_empty(20)


def test_a_member_that_comes_back_with_another_key_is_refused(tmp_path: Path, dialer: JoinDialer) -> None:
    with open_seed(tmp_path, 1) as seed:
        dialer.dial(seed, 7).join()
        seed.wait_formed(20)
    with open_seed(tmp_path, 1) as seed:
        impostor = dialer.dial(seed, 7)
        impostor.apply()
        assert "another key" in impostor.receive(JoinRefusedMessage).reason
        wait_for_event(seed, "refused", "another key")


def test_members_that_do_not_come_back_in_time_are_gone(tmp_path: Path, dialer: JoinDialer) -> None:
    with open_seed(tmp_path, 1) as seed:
        dialer.dial(seed, 7).join()
        seed.wait_formed(20)
    with open_seed(tmp_path, 1, formation_timeout=0.1) as seed:
        assert seed.wait_empty(20)


def test_nobody_learns_of_a_membership_that_could_not_be_kept(
    tmp_path: Path, dialer: JoinDialer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    with open_seed(tmp_path, 1) as seed:
        monkeypatch.setattr("nexar.cluster.seed_state.write_secret_file", full)
        line = dialer.dial(seed, 7)
        line.join()
        assert "cannot store" in line.receive(JoinRefusedMessage).reason
        with pytest.raises(UsageError, match="No space left"):
            seed.wait_formed(20)
        assert seed.membership is None


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        ({"size": 3}, "formed with 1 members"),
        ({"cluster_token": "0123456789abcdef0123456789abcdef"}, "another token"),
        ({"listen": "127.0.0.1:1"}, "listens at port"),
    ],
    ids=["size", "token", "port"],
)
def test_what_contradicts_the_state_is_refused(
    tmp_path: Path, dialer: JoinDialer, change: dict[str, object], messages: str
) -> None:
    with open_seed(tmp_path, 1) as seed:
        dialer.dial(seed, 7).join()
        seed.wait_formed(20)
    with pytest.raises(UsageError, match=messages):
        open_seed(tmp_path, **{"size": 1, **change})  # type: ignore[arg-type]


def test_a_second_seed_of_the_same_state_finds_the_port_taken(tmp_path: Path) -> None:
    with open_seed(tmp_path) as seed, pytest.raises(UsageError, match=seed.address):
        open_seed(tmp_path)


def test_state_that_others_can_read_is_not_used(tmp_path: Path) -> None:
    with open_seed(tmp_path):
        pass
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.iterdir())
    os.chmod(tmp_path / "seed", 0o644)
    with pytest.raises(UsageError, match="chmod 600"):
        open_seed(tmp_path)
