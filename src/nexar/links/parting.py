"""Closing many links at once, politely: every peer hears of it first, then all are waited for together."""

from __future__ import annotations

import time
from collections.abc import Sequence

from nexar.errors import OperationTimeout
from nexar.links.closing import Closing
from nexar.links.link import Link
from nexar.links.progress import Progress
from nexar.transport.foreign import TransportBroke

_GIVEN_UP = "this side closed the link, and the peer did not answer"


def part(progress: Progress, links: Sequence[Link], *, patience: float, longest: float) -> None:
    """Close all of them. Whoever has not agreed is aborted when nothing was heard from any of them for `patience`
    seconds, or after `longest`; at once at Ctrl-C.

    One after the other would leave nothing of the time to those behind a slow one. What was heard, not what was
    sent: this side repeats its own words by itself, also to the dead.
    """
    closings = {link: closing for link in links if (closing := link.begin_close()) is not None}
    try:
        _await(progress, closings, patience, time.monotonic() + longest)
    finally:
        for link, closing in closings.items():
            if not closing.done:
                link.abort(_GIVEN_UP)


def _await(progress: Progress, closings: dict[Link, Closing], patience: float, deadline: float) -> None:
    heard = -1.0
    while (now := time.monotonic()) < deadline:
        before, heard = heard, _heard(closings)
        if heard == before:
            return
        try:
            progress.wait(list(closings.values()), min(deadline, now + patience))
        except OperationTimeout:
            continue
        except TransportBroke:  # it was told, and nobody drives any more: there is nothing to wait for
            return
        return


def _heard(closings: dict[Link, Closing]) -> float:
    """Grows while anybody says anything. Who has agreed says nothing any more, which is news too."""
    pending = [link for link, closing in closings.items() if not closing.done]
    return len(closings) - len(pending) + sum(link.heard_bytes() for link in pending)
