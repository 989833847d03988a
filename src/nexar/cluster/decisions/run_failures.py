"""Chooses the failure that stops a run on all hosts, from the reports of the launchers. Pure.

The first failure that is not the consequence of another one is chosen, for good. A consequence is chosen until then:
the rank that caused it may take longer to end, or its host may be slow.
"""

from __future__ import annotations

from collections.abc import Mapping

from nexar.cluster.decisions.admission_events import Action, Note, Tell
from nexar.cluster.decisions.guest import Guest
from nexar.cluster.decisions.refusals import Refusal
from nexar.types import NodeId
from nexar.wire.joining import RunFailed


class RunFailures:
    """Of one cluster. `launchers`: those that are connected, by node."""

    def __init__(self, launchers: Mapping[NodeId, Guest]) -> None:
        self._launchers = launchers
        self._ranks: dict[NodeId, range] = {}  # what each launcher has reserved; of some it is not known
        self._chosen: RunFailed | None = None

    def reserved(self, guest: Guest, ranks: range | None) -> list[Action]:
        """A launcher has come, or is back: it is told of the failure that was chosen before. `ranks`: those of its
        children; None: as before, or not known, for the seed was started again since.
        """
        if guest.node is not None and ranks is not None:
            self._ranks[guest.node] = ranks
        return [] if self._chosen is None else [Tell(self._chosen, (guest.connection,))]

    def report(self, guest: Guest, failure: RunFailed) -> list[Action]:
        """A launcher reports a failure. All launchers are told of the chosen one, if it is new; otherwise the reporter
        alone is. Refusal if the guest is not a launcher, or the rank not its child, as far as that is known.
        """
        if guest.node is None or self._launchers.get(guest.node) is not guest:
            raise Refusal("it reported that the run failed, and is no launcher")
        if failure.rank not in self._ranks.get(guest.node, (failure.rank,)):
            raise Refusal(f"it reported that rank {failure.rank} failed, which is not its child")
        if self._chosen is not None and (failure.consequence or not self._chosen.consequence):
            return [Tell(self._chosen, (guest.connection,))]
        self._chosen = failure
        note = Note("run failed", guest.address, guest.node, failure.rank, failure.cause)
        return [note, Tell(failure, tuple(each.connection for each in self._launchers.values()))]
