import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product

import numpy as np
import pytest

from nexar.communicator.rounds import Note, Rounds, completed
from nexar.errors import CollectiveMismatch, CollectiveTimeout, MembershipChanged, UsageError
from tests.ranks import PATIENCE
from tests.unit.communicator.scripted import Communicator, Loss, Needs, Scripted, everybody, losses, membership

ROUNDS = 5
"""More than fit before the last loss of a script, so that nobody has left when it comes."""
RUN, SETTLE = 4, 2
"""Operations of two rounds; operations that come before them on a successor."""


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made


def add_up(comm: Communicator) -> list[tuple[float, tuple[int, ...]]]:
    """Of each round: its sum, and whose parts are in it."""
    rounds = Rounds(comm)
    found = []
    x = np.empty(1)
    for number in range(ROUNDS):
        x[0] = part(comm.node, number)
        rounds.carry_through(lambda now: now.all_reduce(x), None, partial(np.copyto, x, x.copy()))
        found.append((float(x[0]), nodes(rounds)))
        RETURNED.setdefault(comm.node, []).append(found[-1])
    return found


RETURNED: dict[int, list[tuple[float, tuple[int, ...]]]] = {}
"""By node, those who were killed later too."""


def scan_up(comm: Communicator) -> list[tuple[float, tuple[int, ...]]]:
    """As add_up, with a collective in which some ranks need not wait for others."""
    rounds = Rounds(comm)
    found = []
    for number in range(ROUNDS):
        result = rounds.carry_through(lambda now: now.scan(np.array([part(comm.node, number)])), None)  # noqa: B023
        members = nodes(rounds)
        before = members[: members.index(comm.node) + 1]
        assert float(result[0]) == sum(part(node, number) for node in before)
        found.append((0.0, members))
        RETURNED.setdefault(comm.node, []).append(found[-1])
    return found


def part(node: int, number: int) -> float:
    return float(1000 ** (node - 1) * (number + 1))


def nodes(rounds: Rounds[Communicator]) -> tuple[int, ...]:
    return tuple(member.node for member in rounds.contributors.members)


def check(size: int, script: list[Loss], pool: ThreadPoolExecutor, task=add_up) -> None:
    """Survivors have the same rounds, and those who were killed had the same ones as far as they came."""
    RETURNED.clear()
    world = Scripted(membership(range(1, size + 1), 1), script)
    ended = [each for each in world.run(task, pool) if each is not None]
    assert len(ended) == size - len(script)
    assert all(each == ended[0] and len(each) == ROUNDS for each in ended), script
    for returned in RETURNED.values():
        assert returned == ended[0][: len(returned)], script
    if task is add_up:
        assert [total for total, _ in ended[0]] == [
            sum(part(node, number) for node in members) for number, (_, members) in enumerate(ended[0])
        ]


def check_all(size: int, scripts: list[list[Loss]], pool: ThreadPoolExecutor, task=add_up) -> None:
    for script in scripts:
        check(size, script, pool, task)


def needs_of_scans(first: int) -> Needs:
    """Operations from `first` on are scans and barriers, in turn."""

    def needs(rank: int, size: int, operation: int) -> range:
        scanning = operation >= first and not (operation - first) % 2
        return range(rank + 1) if scanning else range(size)

    return needs


def test_without_losses_a_round_is_the_collective_and_a_barrier(pool: ThreadPoolExecutor) -> None:
    world = Scripted(membership([1, 2], 1), [])

    def task(comm: Communicator) -> dict[str, int]:
        rounds = Rounds(comm)
        assert rounds.carry_through(lambda now: now.all_reduce(2), None) == 4
        assert rounds.changes == []
        return dict(comm.calls)

    assert world.run(task, pool) == [{"all_reduce": 1, "barrier": 1}] * 2


@pytest.mark.parametrize("size", [2, 3, 4])
def test_wherever_each_rank_is_hit_by_a_loss_survivors_have_the_same_rounds(
    size: int, pool: ThreadPoolExecutor
) -> None:
    scripts = list(losses(size, RUN))
    assert len(scripts) >= 26
    check_all(size, [[loss] for loss in scripts], pool)


def test_wherever_each_rank_is_hit_by_a_second_loss_survivors_have_the_same_rounds(pool: ThreadPoolExecutor) -> None:
    check_all(3, [list(pair) for pair in product(losses(3, RUN), losses(2, SETTLE + RUN - 1))], pool)


@pytest.mark.parametrize("size", [2, 3])
def test_also_if_some_ranks_have_their_result_before_others_have_come(size: int, pool: ThreadPoolExecutor) -> None:
    check_all(size, [[loss] for loss in losses(size, RUN, needs_of_scans(0))], pool, scan_up)


@pytest.mark.parametrize("seed", range(4))
def test_also_with_two_losses_of_four_at_random(seed: int, pool: ThreadPoolExecutor) -> None:
    chance = random.Random(seed)
    for needs, task in ((lambda _: everybody, add_up), (needs_of_scans, scan_up)):
        firsts = list(losses(4, RUN, needs(0)))
        seconds = list(losses(3, SETTLE + RUN - 1, needs(SETTLE)))
        for _ in range(100):
            check(4, [chance.choice(firsts), chance.choice(seconds)], pool, task)


def test_without_the_commit_ranks_would_disagree(pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests would notice."""
    monkeypatch.setattr(Communicator, "barrier", lambda *_, **__: None)
    scripts = [[loss] for loss in losses(3, RUN // 2)]
    with pytest.raises((AssertionError, CollectiveMismatch)):
        check_all(3, scripts, pool)


def test_without_a_barrier_after_the_notes_ranks_would_disagree(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One runs again and has its result while another, interrupted over the notes, still holds the earlier one."""

    def settle(self: Rounds[Communicator], timeout: float | None) -> None:
        mine = np.array([1, self._call, self._held])
        notes = [Note(*row) for row in self.communicator.all_gather(mine).tolist()]
        self._held = min(self._held, completed(notes, self.communicator.rank))
        self._settled = True

    monkeypatch.setattr(Rounds, "_settle", settle)
    firsts, seconds = losses(4, RUN // 2, needs_of_scans(0)), losses(3, 2, needs_of_scans(1))
    scripts = [list(pair) for pair in product(firsts, seconds)]
    with pytest.raises((AssertionError, CollectiveMismatch)):
        check_all(4, scripts, pool, scan_up)


def test_changes_say_who_left_and_what_i_am_now(pool: ThreadPoolExecutor) -> None:
    world = Scripted(membership([7, 8, 9], 4), [Loss(0, (1, 1, 1))])

    def task(comm: Communicator) -> Rounds[Communicator]:
        rounds = Rounds(comm)
        rounds.carry_through(lambda now: now.all_reduce(1), None)
        return rounds

    killed, *left = world.run(task, pool)
    assert killed is None
    (event,) = left[1].changes
    assert (event.epoch, event.old_size, event.size, event.old_rank, event.rank) == (5, 3, 2, 2, 1)
    assert (event.left, event.joined) == ({0: "killed"}, ())
    assert event.communicator is left[1].communicator
    # All three held the result, so it is of all three, although one was lost before it was returned.
    assert [member.node for member in left[1].contributors.members] == [7, 8, 9]
    assert "1 calls, 1 changes" in repr(left[1])


def test_when_others_join_it_is_for_the_caller_to_begin_anew() -> None:
    comm = Scripted(membership([1], 1), []).at(0)
    rounds = Rounds(comm)
    change = MembershipChanged(communicator=comm, lost={}, joined=(1,), completed_by_all=None)
    with pytest.raises(MembershipChanged) as caught:
        rounds.carry_through(_raising(change), None)
    assert caught.value is change
    assert rounds.communicator is comm


def test_other_errors_pass_through_and_end_the_call() -> None:
    rounds = Rounds(Scripted(membership([1], 1), []).at(0))
    error = CollectiveTimeout(operation="all_reduce", waiting_for="rank 1", timeout=1.0, sequence=0)
    with pytest.raises(CollectiveTimeout):
        rounds.carry_through(_raising(error), None)
    assert (rounds._call, rounds._held) == (1, 0)
    assert rounds.carry_through(lambda _: "well", None) == "well"
    assert (rounds._call, rounds._held) == (2, 2)


def test_a_call_that_is_refused_is_none() -> None:
    rounds = Rounds(Scripted(membership([1], 1), []).at(0))
    with pytest.raises(UsageError):
        rounds.carry_through(_raising(UsageError("no such op")), None)
    assert rounds._call == 0


def test_a_second_thread_is_sent_away() -> None:
    rounds = Rounds(Scripted(membership([1], 1), []).at(0))
    inside, leave = threading.Event(), threading.Event()

    def slow(_: Communicator) -> None:
        inside.set()
        assert leave.wait(PATIENCE)

    first = threading.Thread(target=rounds.carry_through, args=(slow, None))
    first.start()
    assert inside.wait(PATIENCE)
    with pytest.raises(UsageError, match="one call at a time"):
        rounds.carry_through(lambda _: None, None)
    leave.set()
    first.join()


def test_what_all_hold_is_completed() -> None:
    assert completed([Note(1, 5, 5), Note(1, 6, 5), Note(1, 5, 5)], 0) == 5
    assert completed([Note(1, 5, 5), Note(1, 5, 4)], 0) == 4
    assert completed([Note(1, 1, 0)], 0) == 0


@pytest.mark.parametrize(
    "notes",
    [
        [Note(1, 6, 4), Note(1, 5, 4)],  # one had an error in #5, the other had not
        [Note(1, 5, 4), Note(2, 5, 4)],
    ],
)
def test_ranks_that_are_out_of_step_are_told_so_everywhere(notes: list[Note]) -> None:
    for rank in (0, 1):
        with pytest.raises(CollectiveMismatch, match=f"call #{notes[rank].call} of .* here") as caught:
            completed(notes, rank)
        assert caught.value.ranks == [1 - rank]


def _raising(error: Exception):
    def run(_: Communicator) -> None:
        raise error

    return run
