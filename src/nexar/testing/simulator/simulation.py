"""One simulation run, a function of its seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Final

from nexar.cluster.decisions.membership_machine import MembershipMachine
from nexar.cluster.membership import Change, Membership
from nexar.testing.simulator.cluster import SimulatedCluster, first_membership, unmet_conditions
from nexar.testing.simulator.faults import FAULT_SECONDS, FaultInjector
from nexar.testing.simulator.laws import Laws, Violation
from nexar.testing.simulator.nodes import MachineFactory, SeedVoterFactory, seed_voter
from nexar.testing.simulator.world import (
    LONGEST_PROBE,
    PROBE_TIMEOUT,
    RECOVERY_TIMEOUT,
    REMEMBERED,
    SimulatedNetwork,
    SimulationContext,
    Timeline,
)
from nexar.types import NodeId

SETTLE_TIMEOUT: Final = 180.0  # seconds of virtual time after the last fault
_CHECK_INTERVAL: Final = 2.0
_MOST_EVENTS: Final = 50_000
_MOST_EVENTS_EACH: Final = 4_000  # per node: many times the usual


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """The result of a run."""

    seed: int
    nodes: int
    epochs: int
    events: int
    seconds: float
    """Virtual time."""
    digest: int
    """Equal for all runs of this seed."""
    broken: str = ""
    """The violated law, or empty."""
    record: tuple[str, ...] = ()
    """The last events, if a law was violated."""

    def __str__(self) -> str:
        head = f"seed {self.seed}, {self.nodes} nodes: {self.epochs} epochs, {self.events} events"
        again = f"python -m nexar.testing.simulator --seeds {self.seed}:{self.seed + 1} --nodes {self.nodes}"
        lines = "".join(f"  {line}\n" for line in self.record)
        broken = f"\nBROKEN {self.broken}\nagain: {again}" if self.broken else ""
        return f"{lines}{head}, record {self.digest:08x}{broken}"


class Simulation:
    """One cluster and its faults. Factories replace the product's machines, to test the laws."""

    def __init__(
        self,
        seed: int,
        nodes: int,
        *,
        machine_factory: MachineFactory | None = None,
        voter_factory: SeedVoterFactory | None = None,
        remembered: int | None = REMEMBERED,
    ) -> None:
        """`remembered`: last events kept for a violation; None: all, always."""
        self.seed = seed
        self.nodes = nodes
        random = Random(f"{seed}/{nodes}")
        first = first_membership(nodes, random, has_seed=random.random() < 0.9)
        self._keeps_all = remembered is None
        self._is_manual = random.random() < 0.15
        self._applied = ChangeCache()
        self._timeline = Timeline(remembered)
        network = SimulatedNetwork(self._timeline, Random(random.getrandbits(64)))
        most = _MOST_EVENTS + nodes * _MOST_EVENTS_EACH
        world = SimulationContext(self._timeline, network, Laws(first), Random(random.getrandbits(64)), most)
        self.cluster = SimulatedCluster(
            world, machine_factory or self._make, voter_factory or seed_voter, asked=self._is_manual
        )
        self._faults = FaultInjector(self.cluster, Random(random.getrandbits(64)))

    def _make(self, node: NodeId, membership: Membership, random: Random) -> MembershipMachine:
        return membership_machine(node, membership, random, active=not self._is_manual, apply=self._applied)

    def run(self) -> SimulationResult:
        try:
            self._execute()
        except Violation as violation:
            return self._outcome(str(violation))
        return self._outcome("")

    def _execute(self) -> None:
        self.cluster.form(self._faults.clock)
        self._faults.plan()
        self._timeline.run_until(FAULT_SECONDS)
        self._faults.end()
        self._settle()

    def _settle(self) -> None:
        end = self._timeline.now + SETTLE_TIMEOUT
        while (unmet := list(unmet_conditions(self.cluster))) and self._timeline.now < end:
            self._timeline.run_until(self._timeline.now + _CHECK_INTERVAL)
        if unmet:
            more = f" (and {len(unmet) - 3} more)" if len(unmet) > 3 else ""
            raise Violation("a live majority continues, and every node knows its state", "; ".join(unmet[:3]) + more)

    def _outcome(self, broken: str) -> SimulationResult:
        timeline = self._timeline
        record = timeline.last if broken or self._keeps_all else ()
        epochs = self.cluster.last.epoch
        return SimulationResult(
            self.seed, self.nodes, epochs, timeline.events, timeline.now, timeline.digest, broken, record
        )


class ChangeCache:
    """Applies changes, and caches the results. Nodes share memberships: otherwise this is most of the work."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, bytes], tuple[Membership, Membership]] = {}  # by identity of the membership before

    def __call__(self, change: Change, membership: Membership) -> Membership:
        key = (id(membership), change.encode())
        if key not in self._known:
            self._known[key] = (membership, change.apply(membership))  # both are kept, so the identity is not reused
        return self._known[key][1]


def membership_machine(
    node: NodeId,
    membership: Membership,
    random: Random,
    *,
    active: bool = True,
    apply: Callable[[Change, Membership], Membership] = Change.apply,
) -> MembershipMachine:
    """The product's machine."""
    return MembershipMachine(
        node,
        membership,
        recovery_timeout=RECOVERY_TIMEOUT,
        probe_timeout=PROBE_TIMEOUT,
        longest_probe=LONGEST_PROBE,
        active=active,
        random=random,
        apply=apply,
    )
