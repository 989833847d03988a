"""A cluster of doctors: each dials every other one over each transport, and rank 0 hears what all have seen.

Nobody leaves before rank 0 has concluded: until then others may still want to reach it. A doctor that cannot get its
report to rank 0, over any connection that either of them made, keeps it and shows it where it runs.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from nexar.cli.doctor.conversation import Conversation
from nexar.cli.doctor.observations import Finding, Reach, Report
from nexar.cli.doctor.questions import Conclude, Hand
from nexar.cli.doctor.reachability import NOT_OFFERED, PROTOCOLS
from nexar.cluster.circle import Circle
from nexar.cluster.membership import Membership
from nexar.cluster.node import Node
from nexar.cluster.pins import why_not
from nexar.transport.base import Carrier, CarrierLost, ConnectRefused, Expected
from nexar.types import Rank

DIAL_TIMEOUT: Final = 5.0
"""Seconds for one dial: where packets are thrown away, nothing but time says so."""
_AT_ONCE: Final = 8
_CLOSE_TIMEOUT: Final = 2.0
_FIRST: Final[Rank] = 0


def patience(size: int) -> float:
    """Seconds in which every doctor of so many has dialed all others, even if nothing answers."""
    rounds = -(-len(PROTOCOLS) * (size - 1) // _AT_ONCE)
    return 10.0 + 2 * DIAL_TIMEOUT * rounds


class Consultation:
    """The `Acceptor` of one doctor's node. Close it before the node."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._changed = threading.Condition()  # over everything below
        self._membership: Membership | None = None
        self._early: list[Carrier] = []
        self._conversations: list[tuple[Rank, Conversation]] = []
        self._reports: dict[Rank, Report] = {}
        self._conclusion: tuple[Finding, ...] | None = None

    def adopt(self, membership: Membership) -> Rank:
        """From now on these are the doctors. Our own rank among them."""
        with self._changed:
            self._membership = membership
            early, self._early = self._early, []
        for carrier in early:
            self._receive(carrier, membership)
        rank = membership.rank_of(self._node.id)
        assert rank is not None  # the worker has got this membership because we are in it
        return rank

    # -- dialing: the thread that asks -------------------------------------------------------------------

    def examine(self, rank: Rank) -> tuple[Reach, ...]:
        """Dial everybody, over each transport, as `rank`."""
        membership = self._known()
        wanted = [(dest, scheme) for dest in range(membership.size) if dest != rank for scheme in PROTOCOLS]
        with ThreadPoolExecutor(max_workers=_AT_ONCE, thread_name_prefix="nexar-doctor") as pool:
            return tuple(pool.map(lambda pair: self._reach(rank, *pair), wanted))

    def _reach(self, source: Rank, dest: Rank, scheme: str) -> Reach:
        member = self._known().member(dest)
        ways = self._node.ways_to(member).get(scheme, ())
        if not ways or scheme not in self._node.network_schemes:
            return Reach(source, dest, scheme, problem=NOT_OFFERED)
        expected = Expected(member.node, member.fingerprint)
        try:
            carrier = self._node.dialer.dial({scheme: ways}, expected, time.monotonic() + DIAL_TIMEOUT)
            conversation = self._begin(carrier, dest)
            found = conversation.sound(time.monotonic() + DIAL_TIMEOUT)
        except (ConnectRefused, CarrierLost, TimeoutError) as error:
            problem = getattr(error, "reason", None) or str(error) or "no answer"
            return Reach(source, dest, scheme, problem=problem.removeprefix(f"{scheme}: "))
        mtu = conversation.mtu_bytes()
        return Reach(source, dest, scheme, round_trip=found.round_trip, mtu_bytes=mtu, skew=found.skew)

    # -- what all have seen ------------------------------------------------------------------------------

    def collect(self, own: Report, timeout: float) -> dict[Rank, Report]:
        """Rank 0: the reports of all, or of those that came in time."""
        size = self._known().size
        with self._changed:
            self._reports[own.rank] = own
            self._changed.wait_for(lambda: len(self._reports) == size, timeout)
            return dict(self._reports)

    def conclude(self, findings: tuple[Finding, ...]) -> None:
        """Rank 0: tell everybody, on every connection that there is."""
        with self._changed:
            conversations = [conversation for _, conversation in self._conversations]
        for conversation in conversations:
            _try_to_say(conversation, Conclude(findings))

    def hand_over(self, report: Report, timeout: float) -> tuple[Finding, ...] | None:
        """The others: give the report to rank 0, and wait for its conclusion. None if it cannot be had in time."""
        deadline = time.monotonic() + timeout
        told: list[Conversation] = []
        while self._conclusion is None and time.monotonic() < deadline:
            with self._changed:
                fresh = [one for rank, one in self._conversations if rank == _FIRST and one not in told]
                if not fresh and self._conclusion is None:
                    self._changed.wait(max(0.0, deadline - time.monotonic()))
            for conversation in fresh:
                _try_to_say(conversation, Hand(report))
            told += fresh
        return self._conclusion

    # -- Acceptor, and what is heard: the driving thread -----------------------------------------------------

    def carrier_accepted(self, carrier: Carrier) -> None:
        """See Acceptor."""
        with self._changed:
            membership = self._membership
            if membership is None:
                self._early.append(carrier)
                return
        self._receive(carrier, membership)

    def candidate_refused(self, address: str, reason: str) -> None:
        """See Acceptor. The one that knocked says so in its own report."""

    def _receive(self, carrier: Carrier, membership: Membership) -> None:
        refusal, rank = why_not(carrier, Circle(self._node.id, membership)), membership.rank_of(carrier.peer.node)
        if refusal is not None or rank is None:
            carrier.abort(refusal or "it holds no rank")
        else:
            self._begin(carrier, rank)

    def _begin(self, carrier: Carrier, peer: Rank) -> Conversation:
        conversation = Conversation(carrier, self._hear)
        with self._changed:
            self._conversations.append((peer, conversation))
            self._changed.notify_all()
        return conversation

    def _hear(self, conversation: Conversation, said: Hand | Conclude) -> None:
        with self._changed:
            if isinstance(said, Conclude):
                self._conclusion = said.findings
            else:
                self._reports[said.report.rank] = said.report
            self._changed.notify_all()

    def _known(self) -> Membership:
        assert self._membership is not None  # `adopt` comes first
        return self._membership

    def close(self) -> None:
        """Politely, within two seconds: what was said last still arrives."""
        with self._changed:
            conversations = [conversation for _, conversation in self._conversations]
            early, self._early = self._early, []
        for carrier in early:
            carrier.abort("this doctor has left")
        for conversation in conversations:
            conversation.finish()
        deadline = time.monotonic() + _CLOSE_TIMEOUT
        for conversation in conversations:
            conversation.ended.wait(max(0.0, deadline - time.monotonic()))


def _try_to_say(conversation: Conversation, said: Hand | Conclude) -> None:
    try:
        conversation.say(said)
    except CarrierLost:
        return  # there may be another connection to the same peer; who hears nothing says so itself
