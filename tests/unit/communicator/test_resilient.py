import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest

from nexar.arrays.compression.sparse import TopK
from nexar.communicator.communicator import Communicator as Real
from nexar.communicator.local import local_communicators
from nexar.communicator.resilient import RetryRounds, RoundState, Team, completed_by_all
from nexar.config import Config
from nexar.errors import CollectiveMismatch, CollectiveTimeout, MembershipChanged, UsageError
from tests.ranks import EVENT_TIMEOUT, on_every
from tests.unit.communicator.scripted import Communicator, Loss, Needs, Scripted, everybody, losses, membership


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made


def survivors(
    task: Callable[[Team[Communicator]], Any], pool: ThreadPoolExecutor, loss: Loss | None = None, size: int = 3
) -> list[Any]:
    """What the task gives, by old rank. If not said otherwise, rank 1 is lost before anybody has the result."""
    world = Scripted(membership(range(1, size + 1), 1), [loss or Loss(1, (0,) * size)])
    return [each for each in world.run(lambda comm: task(Team(comm)), pool) if each is not None]


def row(team: Team[Communicator]) -> np.ndarray:
    return np.full(6, 10.0**team.rank)


VERBS: dict[str, tuple[Callable[[Team[Communicator]], Any], list[Any]]] = {
    "barrier": (lambda team: [team.barrier()], [[None], [None]]),
    "all_reduce": (lambda team: team.all_reduce(row(team))[0], [101, 101]),
    "all_reduce of a number": (lambda team: team.all_reduce(10.0**team.rank), [101, 101]),
    "all_reduce out": (lambda team: team.all_reduce(row(team), out=np.empty(6))[0], [101, 101]),
    "all_reduce_bucketed": (
        lambda team: [x[0] for x in team.all_reduce_bucketed([row(team), row(team)])],
        [[101, 101], [101, 101]],
    ),
    "all_reduce_compressed": (lambda team: team.all_reduce_compressed(row(team), TopK(1))[0], [101, 101]),
    "all_reduce_compressed out": (
        lambda team: team.all_reduce_compressed(row(team), TopK(1), out=np.empty(6))[0], [101, 101],
    ),
    "all_gather": (lambda team: team.all_gather(row(team))[:, 0].tolist(), [[1, 100], [1, 100]]),
    "all_gather_v": (lambda team: [x[0] for x in team.all_gather_v(row(team))], [[1, 100], [1, 100]]),
    "all_gather_object": (lambda team: team.all_gather_object(f"I was {team.rank}"), [["I was 0", "I was 2"]] * 2),
    "reduce_scatter": (lambda team: team.reduce_scatter(np.arange(6) + row(team)).tolist(), [
        [101, 103, 105], [107, 109, 111],
    ]),
    "scan": (lambda team: team.scan(row(team))[0], [1, 101]),
    "exclusive_scan": (lambda team: team.exclusive_scan(row(team))[0], [0, 1]),
    "all_to_all": (lambda team: team.all_to_all(np.arange(6) + row(team)).tolist(), [
        [1, 2, 100, 101], [5, 6, 104, 105],
    ]),
    "broadcast": (lambda team: team.broadcast(row(team), 2)[0], [100, 100]),
    "broadcast_object": (lambda team: team.broadcast_object(f"I was {team.rank}", root=2), ["I was 2"] * 2),
}  # fmt: skip


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_gives_what_the_survivors_brought(verb: str, pool: ThreadPoolExecutor) -> None:
    call, expected = VERBS[verb]
    assert survivors(call, pool) == expected


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_gives_what_all_brought_once_all_hold_it(verb: str, pool: ThreadPoolExecutor) -> None:
    def task(team: Team[Communicator]) -> tuple[Any, int]:
        return VERBS[verb][0](team), team.contributors.size

    prior = 1 if verb.startswith("broadcast") else 0  # on the root
    held = 0 if verb == "barrier" else 1
    ended = survivors(task, pool, Loss(1, (prior + held,) * 3))
    alone = Scripted(membership([1, 2, 3], 1), []).run(lambda comm: VERBS[verb][0](Team(comm)), pool)
    assert ended == [(alone[0], 3), (alone[2], 3)]


def test_an_array_that_is_hit_halfway_is_restored_first(pool: ThreadPoolExecutor) -> None:
    def task(team: Team[Communicator]) -> list[float]:
        wide = np.zeros((4, 3))
        column = wide[:, 1]  # not contiguous
        column[:] = 10.0**team.rank
        team.all_reduce(column)
        whole = np.full(3, 1.0)
        team.all_reduce(whole[:2], out=whole[1:])  # input and output overlap
        team.barrier()  # nobody leaves before the loss
        return [*wide[:, 1].tolist(), *wide[:, 0].tolist(), whole[2]]

    for loss in losses(3, 4):
        ended = survivors(task, pool, loss)
        assert ended[0] == ended[1]
        assert ended[0][:4] in ([111] * 4, [111 - 10**loss.victim] * 4)
        assert ended[0][4:8] == [0] * 4
        assert ended[0][8] in (2, 3)


def test_a_residual_is_that_of_the_run_that_counts(pool: ThreadPoolExecutor) -> None:
    def task(team: Team[Communicator]) -> list[float]:
        x, residual = row(team), np.zeros(6)
        team.all_reduce_compressed(x, TopK(1), residual=residual)
        out = np.empty(6)
        team.all_reduce_compressed(row(team), TopK(1), residual=residual, out=out)
        team.barrier()  # nobody leaves before the loss
        return [x[0], residual[0]]

    for loss in losses(3, 4):
        ended = survivors(task, pool, loss)
        assert ended[0] == ended[1]
        assert ended[0][1] == 2, "each call counts once, however often it was run"


@pytest.mark.parametrize("verb", ["broadcast", "broadcast_object"])
def test_a_root_that_is_lost_is_reported_by_every_survivor_and_the_next_call_goes_on(
    verb: str, pool: ThreadPoolExecutor
) -> None:
    def task(team: Team[Communicator]) -> list[Any]:
        x = row(team)
        reported: list[Any] = []
        try:
            found = team.broadcast(x, root=0)[0] if verb == "broadcast" else team.broadcast_object(x[0], root=0)
            reported.append(found)
        except MembershipChanged as change:
            reported.append(dict(change.lost) if change.communicator is team.communicator else change)
        reported.append(team.all_reduce(1))
        team.barrier()  # nobody leaves before the loss
        return reported

    seen = set()
    for loss in losses(3, 5):
        if loss.victim:
            continue
        one, other = survivors(task, pool, loss)
        assert one == other, loss
        assert one[0] in (1, {0: "killed"})
        assert one[1] == (2 if isinstance(one[0], dict) else one[1])
        seen.add(str(one[0]))
    assert len(seen) == 2


def test_ranks_that_mean_different_roots_after_a_change_are_all_notified(pool: ThreadPoolExecutor) -> None:
    """One is still in the call before when it comes: it sees the new ranks at its next call, the other one does not."""

    def task(team: Team[Communicator]) -> list[Any]:
        team.barrier()
        try:
            return [team.broadcast(row(team), root=1)[0]]
        except MembershipChanged as change:
            return [dict(change.lost), team.broadcast_object(f"rank {team.rank}", root=1)]

    one, other = survivors(task, pool, Loss(0, (0, 1, 0)))
    assert one == other == [{0: "killed"}, "rank 1"]


def test_blocks_that_do_not_go_up_are_refused_before_anybody_is_asked() -> None:
    comm = Scripted(membership([1, 2, 3], 1), []).at(0)
    team = Team(comm)
    for nonsense in (np.arange(7), 3.0):
        with pytest.raises(UsageError, match="3 equal blocks"):
            team.all_to_all(nonsense)
    for root in (3, -1, "0"):
        with pytest.raises(UsageError, match="ranks 0 to 2"):
            team.broadcast(np.zeros(2), root)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="one array"):
        team.all_reduce_bucketed(np.zeros(2))  # type: ignore[arg-type]
    assert not comm.calls


def test_a_team_shows_where_it_is(pool: ThreadPoolExecutor) -> None:
    def task(team: Team[Communicator]) -> tuple[Any, ...]:
        team.all_reduce(1)
        assert "2 calls" not in repr(team)
        (event,) = team.changes
        assert event.communicator is team.communicator
        return team.rank, team.size, team.contributors.size, event.old_rank

    assert survivors(task, pool) == [(0, 2, 2, 0), (1, 2, 2, 2)]


def test_a_real_communicator_has_all_that_a_team_needs() -> None:
    def task(comm: Real) -> None:
        team = Team(comm)
        x = np.full(4, comm.rank + 1.0)
        assert team.all_reduce(x) is x
        assert x.tolist() == [3.0] * 4
        assert team.all_reduce(1.0, "max", timeout=5) == 1.0
        assert [y.tolist() for y in team.all_reduce_bucketed([np.ones(2), np.ones(1)], bucket_bytes=8)] == [[2, 2], [2]]
        assert team.all_reduce_compressed(np.ones(4), TopK(0.5), residual=np.zeros(4)).tolist() == [2, 2, 0, 0]
        assert team.all_gather(x[:1], algorithm="ring").tolist() == [[3], [3]]
        assert [len(each) for each in team.all_gather_v(np.zeros(comm.rank))] == [0, 1]
        assert team.all_gather_object({"rank": comm.rank}) == [{"rank": 0}, {"rank": 1}]
        assert team.reduce_scatter(np.arange(2.0), deterministic=True).tolist() == [2.0 * comm.rank]
        assert team.scan(np.ones(1)).tolist() == [comm.rank + 1]
        assert team.exclusive_scan(np.ones(1)).tolist() == [comm.rank]
        assert team.all_to_all(np.arange(2) + 10 * comm.rank).tolist() == [comm.rank, 10 + comm.rank]
        assert team.broadcast(np.full(2, comm.rank), root=1).tolist() == [1, 1]
        assert team.broadcast_object(comm.rank, root=1, timeout=5) == 1
        team.barrier(timeout=5)
        with pytest.raises(UsageError):
            team.all_reduce(x, "no such op")
        assert (team.rank, team.size, team.communicator, team.changes) == (comm.rank, 2, comm, [])
        assert team.contributors == comm.membership

    with local_communicators(2, Config()) as world:
        on_every(world, task)


ROUNDS = 5
"""More than fit before the last loss of a script, so that nobody has left when it comes."""
RUN, SETTLE = 4, 2
"""Operations of two rounds; operations that come before them on a successor."""


def add_up(comm: Communicator) -> list[tuple[float, tuple[int, ...]]]:
    """Of each round: its sum, and whose parts are in it."""
    rounds = RetryRounds(comm)
    found = []
    x = np.empty(1)
    for number in range(ROUNDS):
        x[0] = part(comm.node, number)
        rounds.run_to_completion(lambda now: now.all_reduce(x), None, partial(np.copyto, x, x.copy()))
        found.append((float(x[0]), nodes(rounds)))
        RETURNED.setdefault(comm.node, []).append(found[-1])
    return found


RETURNED: dict[int, list[tuple[float, tuple[int, ...]]]] = {}
"""By node, those who were killed later too."""


def scan_up(comm: Communicator) -> list[tuple[float, tuple[int, ...]]]:
    """As add_up, with a collective in which some ranks need not wait for others."""
    rounds = RetryRounds(comm)
    found = []
    for number in range(ROUNDS):
        result = rounds.run_to_completion(lambda now: now.scan(np.array([part(comm.node, number)])), None)  # noqa: B023
        members = nodes(rounds)
        before = members[: members.index(comm.node) + 1]
        assert float(result[0]) == sum(part(node, number) for node in before)
        found.append((0.0, members))
        RETURNED.setdefault(comm.node, []).append(found[-1])
    return found


def part(node: int, number: int) -> float:
    return float(1000 ** (node - 1) * (number + 1))


def nodes(rounds: RetryRounds[Communicator]) -> tuple[int, ...]:
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
        rounds = RetryRounds(comm)
        assert rounds.run_to_completion(lambda now: now.all_reduce(2), None) == 4
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

    def settle(self: RetryRounds[Communicator], timeout: float | None) -> None:
        mine = np.array([1, self._call, self._held])
        notes = [RoundState(*row) for row in self.communicator.all_gather(mine).tolist()]
        self._held = min(self._held, completed_by_all(notes, self.communicator.rank))
        self._compared = True

    monkeypatch.setattr(RetryRounds, "_compare_states", settle)
    firsts, seconds = losses(4, RUN // 2, needs_of_scans(0)), losses(3, 2, needs_of_scans(1))
    scripts = [list(pair) for pair in product(firsts, seconds)]
    with pytest.raises((AssertionError, CollectiveMismatch)):
        check_all(4, scripts, pool, scan_up)


def test_changes_say_who_left_and_what_i_am_now(pool: ThreadPoolExecutor) -> None:
    world = Scripted(membership([7, 8, 9], 4), [Loss(0, (1, 1, 1))])

    def task(comm: Communicator) -> RetryRounds[Communicator]:
        rounds = RetryRounds(comm)
        rounds.run_to_completion(lambda now: now.all_reduce(1), None)
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
    rounds = RetryRounds(comm)
    change = MembershipChanged(communicator=comm, lost={}, joined=(1,), completed_by_all=None)
    with pytest.raises(MembershipChanged) as caught:
        rounds.run_to_completion(_raising(change), None)
    assert caught.value is change
    assert rounds.communicator is comm


def test_other_errors_pass_through_and_end_the_call() -> None:
    rounds = RetryRounds(Scripted(membership([1], 1), []).at(0))
    error = CollectiveTimeout(operation="all_reduce", waiting_for="rank 1", timeout=1.0, sequence=0)
    with pytest.raises(CollectiveTimeout):
        rounds.run_to_completion(_raising(error), None)
    assert (rounds._call, rounds._held) == (1, 0)
    assert rounds.run_to_completion(lambda _: "well", None) == "well"
    assert (rounds._call, rounds._held) == (2, 2)


def test_a_call_that_is_refused_is_none() -> None:
    rounds = RetryRounds(Scripted(membership([1], 1), []).at(0))
    with pytest.raises(UsageError):
        rounds.run_to_completion(_raising(UsageError("no such op")), None)
    assert rounds._call == 0


def test_a_second_thread_is_sent_away() -> None:
    rounds = RetryRounds(Scripted(membership([1], 1), []).at(0))
    inside, leave = threading.Event(), threading.Event()

    def slow(_: Communicator) -> None:
        inside.set()
        assert leave.wait(EVENT_TIMEOUT)

    first = threading.Thread(target=rounds.run_to_completion, args=(slow, None))
    first.start()
    assert inside.wait(EVENT_TIMEOUT)
    with pytest.raises(UsageError, match="one call at a time"):
        rounds.run_to_completion(lambda _: None, None)
    leave.set()
    first.join()


def test_what_all_hold_is_completed() -> None:
    assert completed_by_all([RoundState(1, 5, 5), RoundState(1, 6, 5), RoundState(1, 5, 5)], 0) == 5
    assert completed_by_all([RoundState(1, 5, 5), RoundState(1, 5, 4)], 0) == 4
    assert completed_by_all([RoundState(1, 1, 0)], 0) == 0


@pytest.mark.parametrize(
    "notes",
    [
        [RoundState(1, 6, 4), RoundState(1, 5, 4)],  # one had an error in #5, the other had not
        [RoundState(1, 5, 4), RoundState(2, 5, 4)],
    ],
)
def test_ranks_that_are_out_of_step_are_notified_everywhere(notes: list[RoundState]) -> None:
    for rank in (0, 1):
        with pytest.raises(CollectiveMismatch, match=f"call #{notes[rank].call} of .* here") as caught:
            completed_by_all(notes, rank)
        assert caught.value.ranks == [1 - rank]


def _raising(error: Exception):
    def run(_: Communicator) -> None:
        raise error

    return run
