"""One benchmark session: two processes or threads connect, work through a plan, and end."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from typing import Any

import conversation
from candidates import Candidate
from conversation import ROUND_TRIP
from report import FOUR_RANKS

from nexar.security.authority import Authority
from nexar.security.certificates import Trust
from nexar.transport.memory import MemoryNetwork
from nexar_tools.bare_nodes import LinkedNode
from nexar_tools.peer_process import PeerPair
from nexar_tools.peer_protocol import HostSpec

Sample = dict[str, Any]
_STARTING = 3.0  # seconds until four processes are connected and warm, on two cores


def run_session(candidate: Candidate, places: tuple[HostSpec, HostSpec], plan: dict[str, Any]) -> list[Sample]:
    """The measurements of one candidate."""
    told = {**plan, "talker": candidate.talker}
    if candidate.one_process:
        return _run_in_threads(told)
    with PeerPair("conversation:ask", "conversation:answer", [told], terms=candidate.terms(), places=places) as pair:
        samples: list[Sample] = pair.results(timeout=300)[0]
    return samples


def run_two_at_once(candidate: Candidate, places: tuple[HostSpec, HostSpec], plan: dict[str, Any]) -> list[Sample]:
    """The 8-byte round trip of two pairs at once: four ranks, more than two cores."""
    begin = time.monotonic() + _STARTING
    told = {**plan, "talker": candidate.talker, "questions": [[ROUND_TRIP, 8]], "begin": begin}
    with ExitStack() as stack:
        pairs = [
            stack.enter_context(
                PeerPair("conversation:ask", "conversation:answer", [told], terms=candidate.terms(), places=places)
            )
            for _ in range(2)
        ]
        return [{**sample, "kind": FOUR_RANKS} for pair in pairs for sample in pair.results(timeout=300)[0]]


def _run_in_threads(plan: dict[str, Any]) -> list[Sample]:
    """Two ranks of one process over the memory transport; they share the GIL."""
    authority = Authority.create("benchmark")
    trust = Trust(authority.certificate_pem)
    network = MemoryNetwork()
    with (
        LinkedNode(authority.admit(1), trust, ["memory"], network=network) as left,
        LinkedNode(authority.admit(2), trust, ["memory"], network=network) as right,
    ):
        near = left.connect(2, right.addresses_for(1))
        far = right.accept()
        other = threading.Thread(target=conversation.answer, args=(right, far, plan))
        other.start()
        samples = conversation.ask(left, near, plan)
        other.join()
    return samples
