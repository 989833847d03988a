"""What members say of communicators that are revoked or closed, and what becomes of it."""

import time
from functools import partial

import pytest

from nexar.communicator import revocations
from nexar.communicator.branch import Branch
from nexar.communicator.communicator import Communicator
from nexar.communicator.lineage import Lineage
from nexar.errors import MembershipChanged, Revoked
from nexar.links.link import Link
from nexar.wire.messages import Message, Revoke
from tests.ranks import PATIENCE, on_every
from tests.unit.cluster.memory_mesh import eventually
from tests.unit.communicator.worlds import World, raised, waiting

# ---------------------------------------------------------------- revoking


def test_a_communicator_that_is_revoked_is_over_for_all_with_the_reason_and_the_rank(world: World) -> None:
    ranks = world(3)
    ends = [waiting(comm) for comm in ranks[1:]]
    ranks[0].revoke("the data is wrong")
    for error in (end() for end in ends):
        assert isinstance(error, Revoked)
        assert error.rank == 0
        assert error.reason in {
            "the data is wrong",
            *(f"the data is wrong (as rank {rank} passed on)" for rank in (1, 2)),
        }
    for comm in ranks:
        assert isinstance(raised(comm.barrier), Revoked)


def test_it_is_passed_on_once_however_often_it_is_heard(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Revoke] = []
    send = Link.send_control

    def counting(link: Link, message: Message) -> bool:
        if isinstance(message, Revoke):
            said.append(message)
        return send(link, message)

    monkeypatch.setattr(Link, "send_control", counting)
    ranks = world(3)
    ranks[0].revoke("once")
    eventually(lambda: all(comm._branch.fate.done for comm in ranks), "all have heard")
    eventually(lambda: len(said) == 6, "all have passed it on")  # each to two others
    ranks[0].revoke("twice")
    ranks[1].revoke("three times")
    assert len(said) == 6
    assert set(said) == {Revoke(0, 1, 0, "once")}


def test_a_part_may_be_revoked_and_the_world_goes_on(world: World) -> None:
    ranks = world(2)
    parts = on_every(ranks, lambda comm: comm.split(0))
    assert parts[0] is not None
    assert parts[1] is not None
    parts[1].revoke("enough")
    error = raised(lambda: parts[0].recv(source=1, timeout=PATIENCE))  # type: ignore[union-attr]
    assert isinstance(error, Revoked)
    assert error.rank == 1
    assert on_every(ranks, lambda comm: comm.all_reduce(1)) == [2, 2]


def test_what_strangers_or_nobody_revoked_goes_on(world: World) -> None:
    ranks = world(3)
    part = on_every(ranks, lambda comm: comm.split(0 if comm.rank < 2 else None))[0]
    assert part is not None
    presence = ranks[0]._presence
    links = {rank: presence.mesh.links()[ranks[rank]._presence.node.id] for rank in (1, 2)}
    presence.revocations.heard(links[2], Revoke(part.id, part.epoch, 0, "I am no member of it"))
    presence.revocations.heard(links[1], Revoke(part.id, part.epoch, 7, "a rank that is not there"))
    presence.revocations.heard(links[1], Revoke(part.id, part.epoch + 1, 1, "another generation"))
    part._branch.fate.check()
    presence.revocations.heard(links[1], Revoke(part.id, part.epoch, 1, "two\nlines"))
    error = raised(part.barrier)
    assert isinstance(error, Revoked)
    assert error.reason == "two lines"


def test_nobody_is_told_what_it_did_itself_and_who_passes_something_on_is_named(world: World) -> None:
    ranks = world(3)
    presence = ranks[0]._presence
    link = presence.mesh.links()[ranks[1]._presence.node.id]
    presence.revocations.heard(link, Revoke(0, 1, 0, "you did it"))
    ranks[0]._branch.fate.check()
    presence.revocations.heard(link, Revoke(0, 1, 2, "the data is wrong"))
    error = raised(ranks[0].barrier)
    assert isinstance(error, Revoked)
    assert (error.rank, error.reason) == (2, "the data is wrong (as rank 1 passed on)")


def test_what_is_revoked_before_this_node_has_made_it_is_over_when_it_is_made(world: World) -> None:
    ranks = world(2)
    presence = ranks[0]._presence
    link = presence.mesh.links()[ranks[1]._presence.node.id]
    successors = on_every(ranks, lambda comm: comm.shrink())
    epoch = successors[0].epoch + 1
    presence.revocations.heard(link, Revoke(0, epoch, 1, "made and revoked"))
    for communicator in range(100, 100 + revocations._MOST_EARLY - 1):  # what is never made gives way
        presence.revocations.heard(link, Revoke(communicator, 1, 1, "never made"))
    third = on_every(successors, lambda comm: comm.shrink())[0]
    assert third.epoch == epoch
    error = raised(third.barrier)
    assert isinstance(error, Revoked)
    assert (error.rank, error.reason) == (1, "made and revoked")
    assert len(presence.revocations._early) <= revocations._MOST_EARLY


def test_early_words_of_several_members_are_all_kept_and_that_of_a_stranger_hides_none(world: World) -> None:
    ranks = world(4)
    presence = ranks[0]._presence
    links = [presence.mesh.links().get(comm._presence.node.id) for comm in ranks]
    parts = on_every(ranks, lambda comm: comm.split(0 if comm.rank < 3 else None))[:3]
    epoch = parts[0].epoch  # type: ignore[union-attr]

    def heard(rank: int, word: Revoke) -> None:
        link = links[rank]
        assert link is not None
        presence.revocations.heard(link, word)

    listed, branch = presence.revocations.listed, parts[0]._branch  # type: ignore[union-attr]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(presence.lineage, "find", lambda *_: None)  # as if it were not made yet
        for rank in (1, 2, 3):
            heard(rank, Revoke(branch.communicator, epoch, rank, "it has closed it", closed=True))
        heard(2, Revoke(branch.communicator, epoch, 2, "enough"))
        heard(3, Revoke(branch.communicator, epoch, 2, "I am no member of it"))
    listed(branch)
    assert branch.closers == {ranks[rank]._presence.node.id for rank in (1, 2)}
    error = raised(parts[0].barrier)  # type: ignore[union-attr]
    assert isinstance(error, Revoked)
    assert (error.rank, error.reason) == (2, "enough")


def test_one_that_has_a_successor_is_not_revoked_any_more(world: World) -> None:
    ranks = world(2)
    on_every(ranks, lambda comm: comm.shrink())
    ranks[0].revoke("too late")
    assert isinstance(raised(ranks[0].barrier), MembershipChanged)


# ---------------------------------------------------------------- closing


def parts_of(ranks: list[Communicator]) -> list[Communicator]:
    return [part for part in on_every(ranks, lambda comm: comm.split(0)) if part is not None]


def test_what_a_rank_has_closed_has_no_successor_and_the_others_hear_who_it_was_at_once(world: World) -> None:
    ranks = world(4, recovery_timeout=PATIENCE)
    parts = parts_of(ranks)
    parts[2].close()
    began = time.monotonic()
    ranks[3].close()
    for part in parts[:2]:
        error = raised(part.barrier)
        assert isinstance(error, Revoked)
        assert (error.rank, error.closed) == (2, True)
        assert "rank 2 has closed it" in str(error)
        assert "split()" in str(error)
        assert raised(part.shrink).args == error.args
    assert time.monotonic() - began < PATIENCE / 2


def test_when_who_has_closed_it_is_gone_too_the_others_go_on(world: World) -> None:
    ranks = world(5)
    parts = parts_of(ranks)
    parts[2].close()
    ranks[3].close()
    for part in (*parts[:2], parts[4]):
        assert isinstance(raised(part.barrier), Revoked)
    ranks[2].close()
    for rank in (0, 1, 4):
        lineage, branch = ranks[rank]._presence.lineage, parts[rank]._branch
        eventually(partial(_is_free, lineage, branch), "it is gone")
    following = on_every([parts[0], parts[1], parts[4]], lambda part: part.shrink(timeout=PATIENCE))
    assert [part.size for part in following] == [3, 3, 3]
    assert on_every(following, lambda part: part.all_reduce(1)) == [3, 3, 3]


def _is_free(lineage: Lineage, branch: Branch) -> bool:
    return not lineage.is_barred(branch)


def test_who_closes_it_while_the_others_wait_for_a_successor_tells_them(world: World) -> None:
    ranks = world(3, recovery_timeout=PATIENCE)
    parts = parts_of(ranks)
    ranks[0]._presence.lineage.closed_by(parts[0]._branch, ranks[1]._presence.node.id)
    ranks[2].close()
    assert isinstance(raised(parts[0].barrier), Revoked)  # so that rank 1 waits for it
    parts[0].close()
    error = raised(parts[1].barrier)
    assert isinstance(error, Revoked)
    assert error.rank == 0


def test_nobody_closes_for_another(world: World) -> None:
    ranks = world(3)
    part = parts_of(ranks)[0]
    presence = ranks[0]._presence
    link = presence.mesh.links()[ranks[1]._presence.node.id]
    presence.revocations.heard(link, Revoke(part.id, part.epoch, 2, "it has closed it", closed=True))
    assert part._branch.closers == set()
    presence.revocations.heard(link, Revoke(part.id, part.epoch, 1, "it has closed it", closed=True))
    assert part._branch.closers == {link.peer}
    assert on_every(ranks[:1], lambda comm: comm.rank) == [0]
    part._branch.fate.check()  # nobody was lost: it goes on among the others
