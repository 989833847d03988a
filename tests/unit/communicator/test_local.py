"""Whole worlds in one process.

The seed's vote in a world of threads.
"""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from nexar.cluster.decisions.membership_events import MembershipMessage
from nexar.cluster.membership import Change, Departure, Member, Membership
from nexar.cluster.mesh import EAGER_WORLD
from nexar.communicator.communicator import Communicator
from nexar.communicator.local import LocalSeedVoter, local_communicators, local_seed
from nexar.config import Config
from nexar.errors import MembershipChanged, NexarError, PeerLost, Revoked, UsageError
from nexar.wire.control import Accept, Accepted, BallotNumber, Message, Ping, Prepare, Promise, Rejected
from tests.ranks import EVENT_TIMEOUT, on_every


@pytest.mark.parametrize("size", [1, 2, 5])
def test_every_rank_reaches_every_other(size: int) -> None:
    def talk(comm: Communicator) -> set[int]:
        for dest in range(size):
            comm.send(comm.rank, dest=dest)
        received = {int(comm.recv()) for _ in range(size)}
        comm.barrier()
        return received

    with local_communicators(size, Config()) as world:
        assert [comm.rank for comm in world] == list(range(size))
        assert on_every(world, talk) == [set(range(size))] * size


def test_a_large_world_opens_links_when_they_are_needed() -> None:
    size = EAGER_WORLD + 1
    with local_communicators(size, Config()) as world:
        assert all(comm._group.mesh.links() == {} for comm in world)
        on_every(world, Communicator.barrier)


def test_two_worlds_do_not_learn_of_each_other() -> None:
    with local_communicators(2, Config()) as one, local_communicators(2, Config()) as other:
        one[0].send(1, dest=1)
        other[0].send(2, dest=1)
        assert [int(world[1].recv()) for world in (other, one)] == [2, 1]


@pytest.mark.parametrize("size", [0, -1, "2", 1.0, None])
def test_a_world_that_cannot_be_is_refused(size: object) -> None:
    with pytest.raises(UsageError, match="whole number of at least 1"), local_communicators(size, Config()):
        pass


def test_everything_is_closed_at_the_end_also_by_who_raised() -> None:
    with pytest.raises(ZeroDivisionError), local_communicators(3, Config()) as world:
        raise ZeroDivisionError
    for comm in world:
        with pytest.raises(UsageError, match="closed"):
            comm.barrier()


def test_when_one_rank_raises_out_of_its_block_the_others_raise_with_its_traceback_and_go_on() -> None:
    def run(comm: Communicator) -> int:
        with comm:
            if comm.rank == 1:
                raise ZeroDivisionError("a step too far")
            with pytest.raises(MembershipChanged) as raised:
                comm.recv(source=1, timeout=EVENT_TIMEOUT)
            assert list(raised.value.lost) == [1]
            assert "raise ZeroDivisionError" in raised.value.lost[1]
            assert "a step too far" in raised.value.lost[1]
            return int(raised.value.communicator.all_reduce(1))

    def end(comm: Communicator) -> int | str:
        try:
            return run(comm)
        except ZeroDivisionError as error:
            return str(error)

    with local_communicators(3, Config()) as world:
        assert on_every(world, end) == [2, "a step too far", 2]


def test_when_one_rank_raises_out_of_its_block_a_world_of_the_manual_policy_names_it() -> None:
    def run(comm: Communicator) -> str:
        with comm:
            if comm.rank == 1:
                raise ZeroDivisionError("a step too far")
            comm.recv(source=1, timeout=EVENT_TIMEOUT)
        return "went on"

    ends: list[BaseException] = []

    def watch(comm: Communicator) -> None:
        try:
            run(comm)
        except (NexarError, ZeroDivisionError) as error:
            ends.append(error)

    with local_communicators(3, Config(recovery_policy="manual")) as world:
        on_every(world, watch)
    assert sorted(type(error).__name__ for error in ends) == ["PeerLost", "PeerLost", "ZeroDivisionError"]
    assert all(error.rank == 1 for error in ends if isinstance(error, PeerLost))


def test_ctrl_c_ends_the_world_at_once() -> None:
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt), local_communicators(2, Config()) as world:
        world[0].recv(source=1, timeout=EVENT_TIMEOUT)


def test_ten_worlds_leave_nothing_behind() -> None:
    for _ in range(10):
        with local_communicators(3, Config()) as world:
            on_every(world, Communicator.barrier)


def test_a_forked_child_is_asked_to_make_its_own_and_the_parent_goes_on() -> None:
    with local_communicators(2, Config()) as world:
        world[0].send(1, dest=1)
        child = os.fork()
        if child == 0:
            os._exit(_used_after_fork(world))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert int(world[1].recv(source=0)) == 1
        on_every(world, Communicator.barrier)


def _used_after_fork(world: list[Communicator]) -> int:
    """In the child: how many verbs did not say what they should."""
    wrong = 0
    verbs = (
        lambda: world[0].send(1, 1),
        lambda: world[0].send(1, 0),
        lambda: world[1].recv(source=0, tag=1),
        world[0].barrier,
    )
    for verb in verbs:
        try:
            verb()
        except UsageError as error:
            wrong += "forked child" not in str(error)
        except BaseException:  # noqa: BLE001 - the child has no other way to say so
            wrong += 10
        else:
            wrong += 100
    for comm in world:
        comm.close()
    return wrong


@pytest.mark.parametrize("closes_first", [False, True])
def test_who_waits_in_a_part_that_a_rank_has_closed_is_notified_who(closes_first: bool) -> None:
    with local_communicators(3, Config()) as world:
        parts = on_every(world, lambda comm: comm.split(0))

        def wait(part: Communicator) -> Revoked:
            with pytest.raises(Revoked, match=r"rank 0 has closed it and takes no part in barrier #1") as reported:
                part.barrier(timeout=4 * EVENT_TIMEOUT)
            return reported.value

        on_every(parts, Communicator.barrier)
        with ThreadPoolExecutor(2) as pool:
            if closes_first:
                parts[0].close()
            waiting = [pool.submit(wait, part) for part in parts[1:]]
            while not closes_first and not parts[0]._context.call_log._mismatch_detector.is_announced(1):
                assert not any(each.done() for each in waiting)
                time.sleep(0)
            parts[0].close()
            for each in waiting:
                reported = each.result(2 * EVENT_TIMEOUT)
                assert (reported.rank, reported.closed) == (0, True)
        assert on_every(world, lambda comm: comm.all_reduce(1)) == [3] * 3  # the others go on


def test_a_part_that_all_close_after_its_last_call_disturbs_nobody() -> None:
    def work(comm: Communicator) -> int:
        total = 0
        for _ in range(20):
            part = comm.split(0)
            total += int(part.all_reduce(1))
            part.close()
        return total

    with local_communicators(3, Config()) as world:
        assert on_every(world, work) == [60] * 3


INSTANCE = (0, 1, 0)
BALLOT = BallotNumber(1, 1)


def a_world() -> tuple[LocalSeedVoter, list[Message]]:
    """Two members; what node 1 receives."""
    members = tuple(Member(node, "here", bytes(32), {}) for node in (1, 2))
    return LocalSeedVoter(Membership("local", 1, members, seed=local_seed())), []


def change_without(node: int) -> bytes:
    return Change(2, left=(Departure(node, "it left"),)).encode()


def test_it_votes_for_who_goes_on_without_one_that_has_left() -> None:
    witness, received = a_world()
    witness.introduce(1, received.append)
    make_story = witness.link(1).send
    witness.introduce(2, lambda _: None)
    witness.forget(2)
    assert make_story(Prepare(INSTANCE, BALLOT))
    assert isinstance(received.pop(), Promise)
    make_story(Accept(INSTANCE, BALLOT, change_without(2)))
    assert received == [Accepted(INSTANCE, BALLOT)]


def test_it_does_not_vote_for_the_removal_of_one_that_is_there() -> None:
    witness, received = a_world()
    witness.introduce(1, received.append)
    make_story = witness.link(1).send
    witness.introduce(2, lambda _: None)
    make_story(Prepare(INSTANCE, BALLOT))
    make_story(Accept(INSTANCE, BALLOT, change_without(2)))
    assert isinstance(received[-1], Rejected)
    assert received[-1].reachable == (2,)


def test_what_is_no_message_about_who_comes_next_is_passed_over() -> None:
    witness, received = a_world()
    assert not isinstance(Ping(1), MembershipMessage)
    witness.introduce(1, received.append)
    assert witness.link(1).send(Ping(1))
    assert received == []


def test_a_member_that_has_left_receives_nothing() -> None:
    witness, received = a_world()
    witness.introduce(1, received.append)
    make_story = witness.link(1).send
    witness.forget(1)
    witness.forget(1)
    make_story(Prepare(INSTANCE, BALLOT))
    assert received == []


def test_each_world_has_a_seed_of_its_own() -> None:
    assert local_seed().node != local_seed().node
