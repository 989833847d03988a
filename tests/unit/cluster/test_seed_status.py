import asyncio
import logging
import signal
import threading
import time

import pytest

from nexar.cluster.decisions.admission_events import SeedEvent, SeedEventKind
from nexar.cluster.membership import Member, Membership
from nexar.cluster.seed_status import (
    MAX_EVENTS,
    FormationStatus,
    SeedLog,
    StatusBoardService,
    describe_seed_event,
    gather_pages,
)
from nexar.errors import UsageError
from nexar.testing.virtual_clock import VirtualClock
from nexar.wire.status import ROWS_PER_PAGE, StatusPage, StatusReport


def test_the_newest_notes_are_kept() -> None:
    log = SeedLog()
    for number in range(MAX_EVENTS + 3):
        log.add(SeedEvent("knocked", f"10.0.0.1:{number}"))
    assert len(log.events) == MAX_EVENTS
    assert log.events[0].address == "10.0.0.1:3"


def test_each_note_is_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "nexar.seed"):
        log = SeedLog()
        log.add(SeedEvent("refused", "10.0.0.1:7", 42, None, "because\nof this"))
        log.add(SeedEvent("committed", reason="4 members"))
    assert [record.getMessage() for record in caplog.records] == [
        "refused: node 000000000000002a at 10.0.0.1:7: because of this",
        "committed: 4 members",
    ]
    assert caplog.records[0].levelno == logging.WARNING


def test_a_long_cause_is_shortened() -> None:
    assert len(describe_seed_event(SeedEvent("child died", rank=3, reason="x" * 10_000))) == 500


def test_who_listens_is_notified_and_may_fail(caplog: pytest.LogCaptureFixture) -> None:
    reported: list[SeedEvent] = []

    def listen(note: SeedEvent) -> None:
        reported.append(note)
        raise RuntimeError("a bug of theirs")

    log = SeedLog(listen)
    log.add(SeedEvent("knocked", "10.0.0.1:7"))
    log.add(SeedEvent("failed"))
    assert reported == log.events
    assert "a bug of theirs" in caplog.text


def test_unauthenticated_peers_without_a_name_make_no_warnings(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "nexar.seed"):
        SeedLog().add(SeedEvent("refused", "10.0.0.1:7", reason="it does not speak TLS"))
    assert caplog.records[0].levelno == logging.INFO


def test_an_unauthenticated_peer_that_is_refused_again_and_again_does_not_fill_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 0.0
    log = SeedLog(clock=lambda: now)

    def warnings(count: int) -> int:
        caplog.clear()
        for number in range(count):
            log.add(SeedEvent("refused", "10.0.0.1:7", number + 1, None, "it left"))
        return sum(record.levelno == logging.WARNING for record in caplog.records)

    with caplog.at_level(logging.DEBUG, "nexar.seed"):
        assert warnings(64) == 64  # ranks of one host with a wrong token
        assert warnings(1000) == 0
        now = 2.5
        assert warnings(1000) == 2
        now = 1000.0
        assert warnings(1000) == 64


MEMBERS = Membership("c", 1, tuple(Member(node, "h", bytes([node]) * 32, {}) for node in (1, 2, 3)))


def made() -> StatusBoardService:
    board = StatusBoardService("c", 3, lambda: 2, clock=VirtualClock())
    board.moved(MEMBERS)
    return board


def states(board: StatusBoardService) -> list[str]:
    return [row.state for row in board.page().rows]


def test_it_knows_how_many_have_come_before_it_knows_the_members() -> None:
    assert StatusBoardService("c", 3, lambda: 2).page().joined == 2


def test_what_happens_at_the_seed_is_shown() -> None:
    board = made()
    kinds: list[SeedEventKind] = ["gone", "left", "child died"]
    for node, kind in enumerate(kinds, 1):
        board.event_added(SeedEvent(kind, "10.0.0.1:1", node, node - 1, "why"))
    assert states(board) == ["lost", "left", "lost"]
    board.event_added(SeedEvent("returned", "10.0.0.1:1", 1, 0))
    assert states(board) == ["running", "left", "lost"]


def test_an_unauthenticated_peer_who_says_the_name_of_a_member_does_it_no_harm() -> None:
    board = made()
    board.event_added(SeedEvent("refused", "6.6.6.6:1", 1, None, "wrong secret"))
    board.event_added(SeedEvent("left", "6.6.6.6:1", 2, None))
    board.event_added(SeedEvent("gone", "6.6.6.6:1"))
    assert states(board) == ["running"] * 3


def test_bulletins_are_shown_with_the_member_that_wrote_them() -> None:
    board = made()
    board.update_report(2, StatusReport(1, 1, pid=77))
    assert [row.bulletin and row.bulletin.pid for row in board.whole().rows] == [None, 77, None]


def test_pages_make_one_board_and_a_row_that_moves_meanwhile_is_shown_once() -> None:
    members = tuple(Member(node, "h", node.to_bytes(32, "big"), {}) for node in range(1, 2 * ROWS_PER_PAGE + 2))
    board = StatusBoardService("c", len(members), lambda: 0)
    board.moved(Membership("c", 1, members))
    assert [row.rank for row in board.whole().rows] == list(range(len(members)))

    def shrinking(first: int) -> StatusPage:
        page = board.page(first)
        board.moved(Membership("c", 2, members[1:]))
        return page

    found = gather_pages(shrinking)
    assert len({row.node for row in found.rows}) == len(found.rows) == found.total


NODES = (11, 12)
MEMBERSHIP = Membership("c", 1, tuple(Member(node, "h", bytes(32), {}) for node in NODES))
GONE = UsageError("it is over")


def note(kind: SeedEventKind, rank: int | None = 0) -> SeedEvent:
    return SeedEvent(kind, "a:1", NODES[rank or 0], rank)


@pytest.fixture
def outcome() -> FormationStatus:
    return FormationStatus()


@pytest.fixture
def formed(outcome: FormationStatus) -> FormationStatus:
    outcome.moved(MEMBERSHIP, NODES)
    return outcome


def test_nothing_is_known_before_it_is_reported(outcome: FormationStatus) -> None:
    assert outcome.membership is None
    assert outcome.wait_formed(0) is None
    assert not outcome.wait_empty(0)


def test_what_has_formed_is_reported_to_those_who_wait(outcome: FormationStatus) -> None:
    thread = threading.Thread(target=outcome.moved, args=(MEMBERSHIP, NODES))
    thread.start()
    assert outcome.wait_formed(10) is MEMBERSHIP
    thread.join()
    assert outcome.membership is MEMBERSHIP


@pytest.mark.parametrize("wait", ["wait_formed", "wait_empty"])
def test_a_signal_that_another_thread_was_given_ends_the_wait(
    outcome: FormationStatus, wait: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is after SIGSTOP and SIGCONT. Only the main thread runs handlers, and nothing wakes it but itself."""

    def handler(*_: object) -> None:
        raise InterruptedError("the signal")

    def given() -> None:
        waiting.wait(10)
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR2)

    waiting = threading.Event()
    resting = outcome._wait
    monkeypatch.setattr(outcome, "_wait", lambda *times: [waiting.set(), resting(*times)][1])
    before = signal.signal(signal.SIGUSR2, handler)
    thread = threading.Thread(target=given)
    thread.start()
    began = time.monotonic()
    try:
        with pytest.raises(InterruptedError, match="the signal"):
            getattr(outcome, wait)(60)
    finally:
        signal.signal(signal.SIGUSR2, before)
        thread.join()
    assert time.monotonic() - began < 30


def test_the_first_failure_is_raised_for_ever(outcome: FormationStatus) -> None:
    outcome.failed(GONE)
    outcome.failed(UsageError("something else"))
    for _ in range(2):
        with pytest.raises(UsageError, match="over"):
            outcome.wait_formed(None)
    assert outcome.wait_empty(None)


def test_what_has_formed_stays_formed_when_the_seed_closes(formed: FormationStatus) -> None:
    formed.failed(GONE)
    assert formed.wait_formed(None) is MEMBERSHIP


@pytest.mark.parametrize("kind", ["gone", "left", "refused", "dropped"])
def test_it_is_empty_when_every_member_has_ended(formed: FormationStatus, kind: SeedEventKind) -> None:
    formed.event_added(note(kind, 0))
    assert not formed.wait_empty(0)
    formed.event_added(note("knocked", 1))
    formed.event_added(note("gone", None))
    assert not formed.wait_empty(0)
    formed.event_added(note(kind, 1))
    assert formed.wait_empty(None)


def test_a_member_that_returned_is_here_again(formed: FormationStatus) -> None:
    for rank in (0, 1):
        formed.event_added(note("gone", rank))
    formed.event_added(note("returned", 1))
    assert not formed.wait_empty(0)


def test_a_commit_that_is_repeated_brings_nobody_back(formed: FormationStatus) -> None:
    for rank in (0, 1):
        formed.event_added(note("gone", rank))
    formed.moved(MEMBERSHIP, NODES)
    assert formed.wait_empty(0)


def test_notes_before_the_commit_do_not_count(outcome: FormationStatus) -> None:
    outcome.event_added(note("gone", 0))
    outcome.moved(MEMBERSHIP, NODES)
    outcome.event_added(note("gone", 1))
    assert not outcome.wait_empty(0)


def test_members_of_a_resumed_cluster_may_come_back_for_a_while(outcome: FormationStatus) -> None:
    outcome.resumed(MEMBERSHIP, time.monotonic() + 1000)
    assert outcome.wait_formed(0) is MEMBERSHIP
    outcome.event_added(note("returned", 0))
    outcome.event_added(note("left", 0))
    assert not outcome.wait_empty(0)  # the other one may still come
    outcome.event_added(note("left", 1))
    assert outcome.wait_empty(None)


def test_then_nobody_is_waited_for_any_more(outcome: FormationStatus) -> None:
    outcome.resumed(MEMBERSHIP, time.monotonic() + 0.02)
    assert outcome.wait_empty(10)


def test_a_task_may_wait_too_and_may_stop_waiting(outcome: FormationStatus) -> None:
    async def wait() -> Membership | None:
        impatient = asyncio.create_task(outcome.formed_soon())
        await asyncio.sleep(0)
        impatient.cancel()
        patient = asyncio.create_task(outcome.formed_soon())
        await asyncio.sleep(0)
        await asyncio.to_thread(outcome.moved, MEMBERSHIP, NODES)
        assert await outcome.formed_soon() is MEMBERSHIP
        return await patient

    assert asyncio.run(wait()) is MEMBERSHIP


def test_a_loop_that_was_closed_over_a_waiting_task_harms_nobody_else(outcome: FormationStatus) -> None:
    loop = asyncio.new_event_loop()
    waiting = outcome.formed_soon()
    task = loop.create_task(waiting)
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    outcome.moved(MEMBERSHIP, NODES)
    assert outcome.wait_formed(0) is MEMBERSHIP
    task._log_destroy_pending = False  # type: ignore[attr-defined]  # that nobody awaits it any more is the point
    waiting.close()


def test_a_task_learns_of_a_failure(outcome: FormationStatus) -> None:
    outcome.failed(GONE)
    with pytest.raises(UsageError, match="over"):
        asyncio.run(outcome.formed_soon())


def test_when_the_members_went_on_those_count_who_are_present(formed: FormationStatus) -> None:
    later = Membership("c", 2, (*MEMBERSHIP.members[1:], Member(13, "h", bytes(32), {})))
    formed.moved(later, (12, 13))
    assert formed.membership is later
    formed.moved(MEMBERSHIP, NODES)  # old news
    assert formed.membership is later
    formed.event_added(SeedEvent("gone", "a:1", 12, 0))
    assert not formed.wait_empty(0)
    formed.event_added(SeedEvent("left", "a:1", 13, 1))
    assert formed.wait_empty(0)


def test_members_of_a_resumed_cluster_that_the_others_removed_are_not_waited_for(outcome: FormationStatus) -> None:
    outcome.resumed(MEMBERSHIP, time.monotonic() + 1000)
    outcome.moved(Membership("c", 2, MEMBERSHIP.members[:1]), (11,))
    outcome.event_added(note("left", 0))
    assert outcome.wait_empty(0)


def test_launchers_are_waited_for_until_the_last_has_left(formed: FormationStatus) -> None:
    assert formed.wait_launchers(0)
    launchers = [SeedEvent("reserved", "a:1", 51), SeedEvent("returned", "a:1", 52)]
    for launcher in launchers:
        formed.event_added(launcher)
    assert not formed.wait_launchers(0)
    formed.event_added(SeedEvent("left", "a:1", 51))
    assert not formed.wait_launchers(0)
    formed.event_added(SeedEvent("gone", "a:1", 52))
    assert formed.wait_launchers(0)
    assert not formed.wait_empty(0)
