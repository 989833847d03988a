"""Messages and facts, in worlds of threads on memory."""

import gc
import math
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from nexar.cluster.failure_monitor import LEFT
from nexar.cluster.membership import Member, Membership
from nexar.collectives.call import RegionCall
from nexar.collectives.context import CollectiveContext
from nexar.communicator.communicator import Communicator, chosen_subgroup, members_of, propose_split, subgroup_of
from nexar.communicator.local import local_communicators
from nexar.config import Config
from nexar.errors import (
    BufferMismatch,
    Cancelled,
    CollectiveTimeout,
    LinkClosed,
    MembershipChanged,
    NexarError,
    OperationTimeout,
    PeerLost,
    UsageError,
)
from nexar.group import Group, deadline_after
from nexar.types import ANY_SOURCE, ANY_TAG
from tests.ranks import EVENT_TIMEOUT, on_every
from tests.unit.cluster.memory_mesh import eventually
from tests.unit.communicator.worlds import World

LARGE = 300_000  # elements: far more than travels whole


@pytest.fixture
def pair() -> Iterator[list[Communicator]]:
    with local_communicators(2, Config()) as made:
        yield made


# ---------------------------------------------------------------- facts


def test_each_rank_knows_its_place(pair: list[Communicator]) -> None:
    assert [comm.rank for comm in pair] == [comm.local_rank for comm in pair] == [0, 1]
    for comm in pair:
        assert (comm.size, comm.local_size, comm.epoch) == (2, 2, 1)
        assert comm.host == comm.membership.member(comm.rank).host
        assert comm.membership == pair[0].membership
    assert repr(pair[1]) == "<nexar.Communicator rank 1 of 2, epoch 1>"


# ---------------------------------------------------------------- messages


@pytest.mark.parametrize("count", [0, 1, 1000, LARGE])
def test_an_array_arrives_as_it_was_sent(pair: list[Communicator], count: int) -> None:
    values = np.arange(count, dtype=np.float64)

    def talk(comm: Communicator) -> np.ndarray | None:
        if comm.rank == 0:
            return comm.send(values, dest=1)
        return comm.recv(source=0)

    _, got = on_every(pair, talk)
    assert got is not None
    assert got.dtype == values.dtype
    assert np.array_equal(got, values)


@pytest.mark.parametrize("count", [3, LARGE])
def test_a_receive_fills_the_buffer_it_was_given_and_returns_it(pair: list[Communicator], count: int) -> None:
    into = np.zeros(count)

    def talk(comm: Communicator) -> object:
        return comm.send(np.ones(count), 1, tag=7) if comm.rank == 0 else comm.recv(into, source=0, tag=7)

    _, got = on_every(pair, talk)
    assert got is into
    assert into.sum() == count


def test_shape_and_gaps_survive(pair: list[Communicator]) -> None:
    values = np.arange(24).reshape(4, 6)[:, ::2]
    pair[0].send(values, dest=1)
    got = pair[1].recv()
    assert np.array_equal(got, values)
    pair[0].send(3.5, dest=1)
    assert pair[1].recv().shape == ()
    pair[0].send([1, 2, 3], dest=1)
    assert pair[1].recv().tolist() == [1, 2, 3]


def test_what_was_sent_may_be_changed_at_once(pair: list[Communicator]) -> None:
    values = np.ones(4)
    for dest in (0, 1):
        values[:] = 1
        pair[0].send(values, dest=dest)
        values[:] = 9
        assert pair[dest].recv(source=0).tolist() == [1] * 4


def test_tags_keep_conversations_apart(pair: list[Communicator]) -> None:
    for tag in (1, None, 2, 0):
        pair[0].send(-1 if tag is None else tag, dest=1, tag=tag)
    assert [int(pair[1].recv(source=0, tag=tag)) for tag in (0, 2, None, 1)] == [0, 2, -1, 1]


def test_messages_of_one_tag_arrive_in_order_large_and_small(pair: list[Communicator]) -> None:
    counts = [1, LARGE, 2, 0, LARGE + 1, 3]

    def talk(comm: Communicator) -> list[int]:
        if comm.rank == 0:
            for count in counts:
                comm.send(np.zeros(count, np.uint8), dest=1, tag=5)
            return []
        return [len(comm.recv(source=0, tag=5)) for _ in counts]

    assert on_every(pair, talk)[1] == counts


def test_wildcards_take_whatever_comes_and_say_where_it_came_from() -> None:
    with local_communicators(3, Config()) as world:
        world[1].send(10, dest=0, tag=4)
        value, source = world[0].recv(source=ANY_SOURCE, tag=ANY_TAG, return_source=True)
        assert (int(value), source.rank, source.tag) == (10, 1, 4)
        world[2].send(20, dest=0)
        value, source = world[0].recv(return_source=True)
        assert (int(value), source.rank, source.tag) == (20, 2, None)
        world[0].send(30, dest=0, tag=6)
        value, source = world[0].recv(source=ANY_SOURCE, tag=ANY_TAG, return_source=True)
        assert (int(value), source.rank, source.tag) == (30, 0, 6)


def test_any_tag_takes_messages_without_one_too_and_no_tag_only_those(pair: list[Communicator]) -> None:
    pair[0].send(1, dest=1, tag=8)
    with pytest.raises(OperationTimeout):
        pair[1].recv(timeout=0.05)
    pair[0].send(2, dest=1)
    got = [pair[1].recv(tag=ANY_TAG, return_source=True) for _ in range(2)]
    assert [(int(value), source.tag) for value, source in got] == [(1, 8), (2, None)]


@pytest.mark.parametrize("count", [0, 5, LARGE])
def test_a_rank_can_send_to_itself(pair: list[Communicator], count: int) -> None:
    comm = pair[1]
    values = np.arange(count)
    comm.send(values, dest=1, tag=2)
    comm.send(values + 1, dest=1, tag=2)
    into = np.zeros(count, values.dtype)
    assert np.array_equal(comm.recv(source=1, tag=2), values)
    assert np.array_equal(comm.recv(into, source=1, tag=2), values + 1)


def test_both_may_send_first_and_receive_then(pair: list[Communicator]) -> None:
    def talk(comm: Communicator) -> int:
        comm.send(np.full(LARGE, comm.rank), dest=1 - comm.rank)
        return int(comm.recv(source=1 - comm.rank)[-1])

    assert on_every(pair, talk) == [1, 0]


def test_ranks_and_tags_may_be_numpy_numbers(pair: list[Communicator]) -> None:
    pair[0].send(1, dest=np.int64(1), tag=np.int32(3))  # type: ignore[arg-type]
    assert int(pair[1].recv(source=np.int64(0), tag=np.int32(3))) == 1  # type: ignore[call-overload]


def test_several_threads_of_one_rank_each_get_their_own(pair: list[Communicator]) -> None:
    def talk(tag: int) -> int:
        pair[0].send(tag, dest=1, tag=tag)
        return int(pair[1].recv(source=0, tag=tag))

    assert on_every(list(range(8)), talk) == list(range(8))


# ---------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize("rank", [-2, 2, 7, 0.0, "1", None])
def test_a_rank_that_does_not_exist_is_refused_with_those_that_do(pair: list[Communicator], rank: object) -> None:
    with pytest.raises(UsageError, match="ranks 0 to 1"):
        pair[0].send(1, dest=rank)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="ranks 0 to 1"):
        pair[0].recv(source=rank)  # type: ignore[call-overload]


def test_nobody_can_send_to_anybody(pair: list[Communicator]) -> None:
    with pytest.raises(UsageError, match="no rank -1"):
        pair[0].send(1, dest=ANY_SOURCE)
    with pytest.raises(UsageError, match="not a tag"):
        pair[0].send(1, dest=1, tag=ANY_TAG)


@pytest.mark.parametrize("timeout", [0, -1, math.nan, "5"])
def test_a_timeout_that_is_none_is_refused(pair: list[Communicator], timeout: object) -> None:
    for verb in (lambda: pair[0].send(1, 1, timeout=timeout), lambda: pair[0].barrier(timeout=timeout)):  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="seconds above 0"):
            verb()


def test_no_limit_is_a_timeout(pair: list[Communicator]) -> None:
    pair[0].send(1, dest=1, timeout=math.inf)
    assert int(pair[1].recv(timeout=math.inf)) == 1


def test_a_receive_that_nobody_answers_names_whom_it_waited_for(pair: list[Communicator]) -> None:
    with pytest.raises(OperationTimeout) as raised:
        pair[0].recv(source=1, tag=3, timeout=0.05)
    assert [peer.rank for peer in raised.value.waiting_for] == [1]
    assert isinstance(raised.value, TimeoutError)
    pair[1].send(5, dest=0, tag=3)  # the link stays usable
    assert int(pair[0].recv(source=1, tag=3)) == 5


def test_a_large_send_that_nobody_receives_names_whom_it_waited_for() -> None:
    with local_communicators(2, Config(early_bytes=1)) as (left, right):
        with pytest.raises(OperationTimeout) as raised:
            left.send(np.zeros(LARGE), dest=1, timeout=0.05)
        assert [peer.rank for peer in raised.value.waiting_for] == [1]
        left.send(1, dest=1)
        assert int(right.recv()) == 1


@pytest.mark.parametrize("into", [np.zeros(5), np.zeros(4, np.float32)], ids=["size", "dtype"])
@pytest.mark.parametrize("dest", [0, 1])
def test_a_buffer_of_another_size_or_dtype_is_refused_and_names_both(
    pair: list[Communicator], into: np.ndarray, dest: int
) -> None:
    pair[0].send(np.zeros(4), dest=dest)
    with pytest.raises(BufferMismatch) as raised:
        pair[dest].recv(into, source=0)
    assert "float64[4]" in str(raised.value)
    assert f"{into.dtype}[{into.size}]" in str(raised.value)


def raised_while_waiting(comm: Communicator, event: Callable[[], None]) -> NexarError:
    """What a receive that waits for rank 1 raises when this happens, long before its own deadline."""
    raised: list[NexarError] = []

    def wait() -> None:
        try:
            comm.recv(source=1, timeout=EVENT_TIMEOUT)
        except NexarError as error:
            raised.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    event()
    waiting.join(EVENT_TIMEOUT / 2)
    return raised[0]


def test_the_peer_of_a_closed_rank_is_notified_at_once() -> None:
    with local_communicators(2, Config(recovery_policy="manual")) as pair:
        raised = raised_while_waiting(pair[0], pair[1].close)
    assert isinstance(raised, PeerLost)
    assert raised.rank == 1


def test_who_waits_for_a_rank_that_leaves_goes_on_with_the_others() -> None:
    with local_communicators(3, Config()) as world:
        raised = raised_while_waiting(world[0], world[1].close)
        assert isinstance(raised, MembershipChanged)
        assert raised.lost == {1: LEFT}
        with pytest.raises(MembershipChanged) as later:  # and every other call on the old one
            world[2].recv(source=0, timeout=EVENT_TIMEOUT)
        left = [raised.communicator, later.value.communicator]
        assert [(comm.rank, comm.size, comm.epoch) for comm in left] == [(0, 2, 2), (1, 2, 2)]
        assert on_every(left, lambda comm: comm.all_reduce(1)) == [2, 2]


def test_a_communicator_that_is_made_after_its_generation_was_replaced_raises_the_change() -> None:
    """As in split(), if a change comes before it returns."""
    with local_communicators(3, Config()) as world:
        runtimes = [comm._runtime for comm in world]
        first = world[0].membership
        made = on_every(runtimes, lambda runtime: runtime.successors.begin(first, 7, deadline_after(EVENT_TIMEOUT)))
        raising = ValueError("on purpose")
        world[2].__exit__(ValueError, raising, None)
        for runtime, generation in zip(runtimes[:2], made, strict=False):
            assert runtime.successors.wait_for_successor(generation, deadline_after(EVENT_TIMEOUT)) is not None
        late = runtimes[0].successors.wrap(made[0])
        with pytest.raises(MembershipChanged) as changed:
            late.barrier()
        with pytest.raises(MembershipChanged):
            late.on(1).anything()
        others = [changed.value.communicator, made[1].successor]
        assert on_every(others, lambda comm: comm.all_reduce(1)) == [2, 2]


def test_a_closed_communicator_says_so_whatever_is_asked(pair: list[Communicator]) -> None:
    pair[0].close()
    pair[0].close()
    for verb in (lambda: pair[0].send(1, 1), lambda: pair[0].send(1, 0), pair[0].recv, pair[0].barrier):
        with pytest.raises(UsageError, match="closed"):
            verb()
    assert "closed" in repr(pair[0])


def test_a_call_that_waits_while_its_communicator_is_closed_raises_at_once(pair: list[Communicator]) -> None:
    raised = raised_while_waiting(pair[0], pair[0].close)
    assert isinstance(raised, (LinkClosed, UsageError))


def test_ctrl_c_ends_a_receive_and_the_communicator_goes_on(pair: list[Communicator]) -> None:
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        pair[0].recv(source=1, timeout=EVENT_TIMEOUT)
    pair[1].send(2, dest=0)
    assert int(pair[0].recv(source=1)) == 2


# ---------------------------------------------------------------- barrier


def test_a_barrier_that_one_rank_never_reaches_times_out_and_names_a_rank() -> None:
    with local_communicators(2, Config()) as (left, right):
        with pytest.raises(CollectiveTimeout) as raised:
            left.barrier(timeout=0.05)
        assert raised.value.operation == "barrier"
        assert raised.value.sequence == 0
        assert [peer.rank for peer in raised.value.waiting_for] == [1]
        assert right.size == 2


def test_a_barrier_that_was_refused_does_not_count(pair: list[Communicator]) -> None:
    with pytest.raises(UsageError, match="leaves no time"):
        pair[0].barrier(timeout=0)
    on_every(pair, lambda comm: comm.barrier(timeout=EVENT_TIMEOUT))


def test_many_barriers_in_a_row_stay_in_step() -> None:
    with local_communicators(3, Config()) as world:
        arrived = [0, 0, 0]

        def run(comm: Communicator) -> None:
            for number in range(1, 51):
                arrived[comm.rank] = number
                comm.barrier()
                assert min(arrived) >= number

        on_every(world, run)


def test_ctrl_c_between_the_number_of_a_call_and_its_run_is_reported_to_the_others(
    pair: list[Communicator], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = CollectiveContext.begin

    def interrupted(assembly: CollectiveContext, *facts: Any) -> RegionCall:
        call = begin(assembly, *facts)
        if assembly.group.rank == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return call

    monkeypatch.setattr(CollectiveContext, "begin", interrupted)
    others: list[BaseException] = []

    def other() -> None:
        try:
            pair[1].barrier()
        except Cancelled as error:
            others.append(error)

    thread = threading.Thread(target=other)
    with pytest.raises(KeyboardInterrupt):
        pair[0].barrier()
    thread.start()
    thread.join(EVENT_TIMEOUT)
    assert [str(error).partition(";")[0] for error in others] == [
        "barrier #0 was cancelled by rank 0: KeyboardInterrupt"
    ]


def test_what_pooled_buffers_saved_is_counted_by_their_size(pair: list[Communicator]) -> None:
    small, large = np.ones(20_000, np.uint8), np.ones(LARGE)
    for _ in range(4):
        requests = [pair[0].start.send(each, 1, tag=3) for each in (small, large)]
        pair[1].probe(0, 3)
        while pair[1].stats()["buffers"]["leased"] < 2:
            pair[1].probe(0, 3)
        for each in (small, large):
            assert np.array_equal(pair[1].recv(np.empty_like(each), 0, tag=3), each)
        for request in requests:
            request.wait(EVENT_TIMEOUT)
    buffers = pair[1].stats()["buffers"]
    assert buffers["tiers"][64 << 10] == {
        "size_bytes": 64 << 10, "hits": 3, "misses": 1, "free": 1, "kept": 256, "hit_rate": 0.75,
    }  # fmt: skip
    assert buffers["tiers"][8 << 20]["hit_rate"] == 0.75
    assert (buffers["hit_rate"], buffers["leased"]) == (0.75, 0)
    assert isinstance(pair[1].stats()["staging"], dict)


def group(rank: int, *, communicator: int = 0, size: int = 4) -> Group:
    def check(wanted: Any) -> int:
        if not isinstance(wanted, int) or not 0 <= wanted < size:
            raise UsageError(f"no rank {wanted}")
        return wanted

    facts = {"rank": rank, "communicator": communicator, "matching": SimpleNamespace(generation=1), "check": check}
    return cast(Group, SimpleNamespace(**facts))


PROPOSALS = [(7, 0), (7, -1), (3, 0), (-1, 5)]


def test_ranks_of_one_colour_are_ordered_by_key_then_by_rank() -> None:
    parts = [subgroup_of(group(rank), PROPOSALS, 5) for rank in range(4)]
    assert [each and each.ranks for each in parts] == [(1, 0), (1, 0), (2,), None]
    assert parts[0] == parts[1]


def test_another_occasion_parent_or_set_of_members_has_another_id() -> None:
    ids = {
        subgroup_of(group(0), PROPOSALS, 5).communicator,  # type: ignore[union-attr]
        subgroup_of(group(0), PROPOSALS, 6).communicator,  # type: ignore[union-attr]
        subgroup_of(group(0, communicator=9), PROPOSALS, 5).communicator,  # type: ignore[union-attr]
        subgroup_of(group(2), PROPOSALS, 5).communicator,  # type: ignore[union-attr]
        chosen_subgroup(group(0), [1, 0], Counter()).communicator,  # type: ignore[union-attr]
    }
    assert len(ids) == 5
    assert all(0 < each < 1 << 63 for each in ids)


def test_a_group_is_counted_by_its_list_so_that_each_has_an_id_of_its_own() -> None:
    mine: Counter[tuple[int, ...]] = Counter()
    theirs: Counter[tuple[int, ...]] = Counter()
    first, second = chosen_subgroup(group(0), [2, 0], mine), chosen_subgroup(group(0), [2, 0], mine)
    assert first != second
    assert first == chosen_subgroup(group(2), [2, 0], theirs)
    assert chosen_subgroup(group(1), [2, 0], Counter()) is None
    for nonsense in ([], [0, 0], [9]):
        with pytest.raises(UsageError):
            chosen_subgroup(group(0), nonsense, mine)


def test_members_keep_their_identities_in_the_new_order() -> None:
    members = tuple(Member(each, "host", bytes(32), {}) for each in range(10, 14))
    made = members_of(Membership("test", 3, members), [2, 0])
    assert [each.node for each in made.members] == [12, 10]
    assert (made.cluster, made.epoch) == ("test", 3)


@pytest.mark.parametrize(("color", "key"), [("red", 0), (-2, 0), (0, 1.5), (1 << 70, 0), (0, 1 << 70), (-1, 0)])
def test_colours_and_keys_are_whole_numbers_and_nothing_is_sent_if_not(color: Any, key: Any) -> None:
    with pytest.raises(UsageError, match="split"):
        propose_split(cast(Any, None), color, key)


def test_a_dropped_part_that_no_thread_can_close_stays_open_and_harms_nobody(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start = threading.Thread.start

    def no_background(thread: threading.Thread) -> None:
        if thread.name.startswith("nexar-background"):
            raise RuntimeError("can't start new thread")
        start(thread)

    def use_and_drop(comm: Communicator) -> None:
        comm.split(0).barrier()

    ranks = world(2)
    monkeypatch.setattr(threading.Thread, "start", no_background)
    on_every(ranks, use_and_drop)
    gc.collect()

    def reported() -> bool:
        return caplog.text.count("a dropped communicator stays open: can't start new thread") == 2

    eventually(reported, "the close that failed, on each rank")
    on_every(ranks, Communicator.barrier)
    assert [len(each._runtime.successors.generations()) for each in ranks] == [2, 2]
