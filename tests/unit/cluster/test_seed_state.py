import os
from dataclasses import replace
from pathlib import Path

import pytest

from nexar.cluster.decisions.paxos import Vote
from nexar.cluster.membership import Member, Membership
from nexar.cluster.seed_state import SeedIdentity, SeedState, make_identity
from nexar.errors import UsageError
from nexar.security.certificates import check_cluster
from nexar.wire.control import BallotNumber


@pytest.fixture
def identity() -> SeedIdentity:
    return replace(make_identity(), port=4711)


@pytest.fixture
def state(tmp_path: Path) -> SeedState:
    return SeedState(tmp_path / "made" / "when needed")


def membership(cluster: str) -> Membership:
    return Membership(cluster, 1, (Member(7, "h", bytes(32), {}),))


def test_two_identities_have_nothing_in_common() -> None:
    one, other = make_identity(), make_identity()
    assert one.node != other.node
    assert one.secret != other.secret
    assert one.authority.cluster != other.authority.cluster
    assert one.fingerprint != other.fingerprint
    assert check_cluster(one.authority.cluster)


def test_a_given_secret_is_taken_and_nothing_secret_shows() -> None:
    made = make_identity(b"s" * 32)
    assert made.secret == b"s" * 32
    assert "ssss" not in repr(made)


def test_an_empty_directory_holds_nothing(state: SeedState) -> None:
    assert state.load_identity() is None
    assert state.load_membership("c") is None


def test_what_was_kept_is_found_again(state: SeedState, identity: SeedIdentity) -> None:
    state.keep_identity(identity)
    found = state.load_identity()
    assert found is not None
    assert (found.node, found.port, found.secret) == (identity.node, 4711, identity.secret)
    assert found.fingerprint == identity.fingerprint
    assert found.authority.export() == identity.authority.export()
    state.keep_membership(membership("c"))
    assert state.load_membership("c") == membership("c")


def test_its_files_are_their_owners_alone(state: SeedState, identity: SeedIdentity, tmp_path: Path) -> None:
    state.keep_identity(identity)
    state.keep_membership(membership("c"))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 2
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in files)


def test_a_membership_of_another_cluster_is_refused(state: SeedState) -> None:
    state.keep_membership(membership("c"))
    with pytest.raises(UsageError, match="of cluster 'c'"):
        state.load_membership("d")


@pytest.mark.parametrize("content", [b"", b"\xc1", b"\x80", bytes(1000)])
def test_damaged_files_are_named(tmp_path: Path, content: bytes) -> None:
    for name in ("seed", "membership"):
        (tmp_path / name).write_bytes(content)
        os.chmod(tmp_path / name, 0o600)
    with pytest.raises(UsageError, match=r"seed is damaged"):
        SeedState(tmp_path).load_identity()
    with pytest.raises(UsageError, match=r"membership is damaged"):
        SeedState(tmp_path).load_membership("c")


def test_every_cut_of_the_file_is_an_error_of_ours(tmp_path: Path, identity: SeedIdentity) -> None:
    SeedState(tmp_path).keep_identity(identity)
    content = (tmp_path / "seed").read_bytes()
    for size in range(0, len(content), 7):
        (tmp_path / "seed").write_bytes(content[:size])
        with pytest.raises(UsageError):
            SeedState(tmp_path).load_identity()


def test_what_others_can_read_is_refused(tmp_path: Path, identity: SeedIdentity) -> None:
    SeedState(tmp_path).keep_identity(identity)
    os.chmod(tmp_path / "seed", 0o640)
    with pytest.raises(UsageError, match="chmod 600"):
        SeedState(tmp_path).load_identity()


def test_a_place_that_is_no_directory_is_named(tmp_path: Path, identity: SeedIdentity) -> None:
    (tmp_path / "file").write_bytes(b"")
    state = SeedState(tmp_path / "file")
    with pytest.raises(UsageError, match="cannot be read"):
        state.load_identity()
    with pytest.raises(UsageError, match="cannot be written"):
        state.keep_identity(identity)


def test_a_vote_is_found_again_and_one_that_is_none_is_named(state: SeedState, tmp_path: Path) -> None:
    assert state.load_vote() is None
    vote = Vote((0, 3, 0), BallotNumber(4, 7), BallotNumber(2, 8), b"who comes next")
    state.keep_vote(vote)
    assert state.load_vote() == vote
    path = tmp_path / "made" / "when needed" / "vote"
    assert path.stat().st_mode & 0o077 == 0
    path.write_bytes(b"scratched")
    with pytest.raises(UsageError, match="vote is damaged"):
        state.load_vote()


def test_a_directory_that_others_can_write_to_is_refused_with_the_remedy(tmp_path: Path) -> None:
    for mode in (0o777, 0o770, 0o702):
        tmp_path.chmod(mode)
        with pytest.raises(UsageError, match="chmod 700"):
            SeedState(tmp_path)
    tmp_path.chmod(0o755)
    SeedState(tmp_path)
