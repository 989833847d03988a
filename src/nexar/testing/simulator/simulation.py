"""One simulation run, a function of its seed; and the shortest run that violates the same law.

`shrink` leaves something out and runs again: first fewer nodes are tried, from the smallest number; then faults are
left out, in halves and finally one by one (delta debugging). A smaller run counts if it violates the same law.
"""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Final, NamedTuple, TypeAlias

from nexar.cluster.decisions.agreement_instances import DEFAULT_LIMITS, AgreementLimits
from nexar.cluster.decisions.node_machine import NodeMachine
from nexar.cluster.decisions.successor_state import NextGeneration
from nexar.cluster.membership import Change, Membership, next_generation
from nexar.testing.simulator.application import ApplicationPlan
from nexar.testing.simulator.cluster import (
    SeedVoterFactory,
    SimulatedCluster,
    first_membership,
    majority_lives,
    present_membership,
    seed_voter,
    unmet_communicators,
    unmet_conditions,
)
from nexar.testing.simulator.faults import FAULT_SECONDS, SLOWEST_CLOCK, FaultInjector
from nexar.testing.simulator.laws import Laws, Violation
from nexar.testing.simulator.nodes import MachineFactory
from nexar.testing.simulator.world import (
    LONGEST_PROBE,
    PROBE_TIMEOUT,
    RECOVERY_TIMEOUT,
    REMEMBERED,
    RecoveryPolicy,
    SimulatedNetwork,
    SimulationContext,
    Timeline,
)
from nexar.types import NodeId

SETTLE_TIMEOUT: Final = 180.0  # seconds of virtual time after the last fault
CALL_BOUND: Final = 1.5 * RECOVERY_TIMEOUT / SLOWEST_CLOCK + 15.0
"""Seconds after which a call must have ended: the longest wait by the slowest clock, after the loss was noticed."""
_CHECK_INTERVAL: Final = 2.0
_SMALL_LIMITS: Final = AgreementLimits(kept=3, ahead=3, distance=8)
"""With which instances of `agree()` are forgotten in a run."""
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
    concerned: tuple[NodeId, ...] = ()
    """The nodes that the violation names."""

    @property
    def law(self) -> str:
        """The name of the violated law, or empty."""
        return self.broken.partition(":")[0]

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
        only: Collection[int] | None = None,
    ) -> None:
        """`remembered`: last events kept for a violation; None: all, always. `only`: indices of the faults to inject;
        None: all.
        """
        self.seed = seed
        self.nodes = nodes
        random = Random(f"{seed}/{nodes}")
        first = first_membership(nodes, random, has_seed=random.random() < 0.9)
        self._keeps_all = remembered is None
        self._only = only
        self._policy = random_policy(random)
        self._applied = ChangeCache()
        self._following = GenerationCache()
        self._timeline = Timeline(remembered)
        network = SimulatedNetwork(self._timeline, Random(random.getrandbits(64)))
        most = _MOST_EVENTS + nodes * _MOST_EVENTS_EACH
        world = SimulationContext(
            self._timeline, network, Laws(first), Random(random.getrandbits(64)), most, self._policy
        )
        world.agreement_limits = random.choice([DEFAULT_LIMITS, _SMALL_LIMITS])
        self.cluster = SimulatedCluster(
            world, machine_factory or self._make, voter_factory or seed_voter, random_program(random)
        )
        self.faults = FaultInjector(self.cluster, Random(random.getrandbits(64)))

    def _make(self, node: NodeId, membership: Membership, random: Random) -> NodeMachine:
        return node_machine(
            node,
            membership,
            random,
            active=self._policy == "automatic",
            apply=self._applied,
            next_generation=self._following,
        )

    def run(self) -> SimulationResult:
        with _without_collection():
            try:
                self._execute()
            except Violation as violation:
                return self._outcome(str(violation), violation.nodes)
            return self._outcome("")

    def _execute(self) -> None:
        self.cluster.form(self.faults.clock)
        self.faults.plan(self._only)
        self._timeline.run_until(FAULT_SECONDS)
        self.faults.end()
        self.cluster.world.agreement_laws.calm_since = self._timeline.now
        self._settle()

    def _settle(self) -> None:
        """Runs until the cluster has settled and the calls that began during the faults have ended."""
        calm = self._timeline.now
        end = calm + SETTLE_TIMEOUT
        while (unmet := self._unmet(calm)) and self._timeline.now < end:
            self._timeline.run_until(self._timeline.now + _CHECK_INTERVAL)
            self._check_bound(calm)
        self._check_memory()
        if unmet:
            more = f" (and {len(unmet) - 3} more)" if len(unmet) > 3 else ""
            raise Violation("a live majority continues, and every node knows its state", "; ".join(unmet[:3]) + more)

    def _unmet(self, calm: float) -> list[str]:
        unmet = list(unmet_conditions(self.cluster))
        if not unmet and self._continues():
            world = self.cluster.world
            for laws in (world.successor_laws, world.agreement_laws):
                unmet += ["a call is pending"] if laws.has_pending(calm + _CHECK_INTERVAL, self._takes_part) else []
            unmet += unmet_communicators(self.cluster)
        return unmet

    def _check_memory(self) -> None:
        for node, member in self.cluster.members.items():
            if member.node_machine is not None and member.alive and not member.is_expelled:
                self.cluster.world.successor_laws.check_memory(node, member.node_machine.successor_machine)

    def _continues(self) -> bool:
        """Whether a majority lives, so that every call must end."""
        present = present_membership(self.cluster)
        return present is not None and majority_lives(self.cluster, present)

    def _takes_part(self, node: NodeId) -> bool:
        member, present = self.cluster.members.get(node), present_membership(self.cluster)
        is_member = present is not None and present.rank_of(node) is not None
        return is_member and member is not None and member.running and not member.is_expelled

    def _check_bound(self, calm: float) -> None:
        """A change starts the time anew."""
        if self._continues():
            calm = max(calm, self.cluster.world.laws.last_change)
            self.cluster.world.successor_laws.overdue(calm, CALL_BOUND, self._takes_part)
            self.cluster.world.agreement_laws.overdue(calm, CALL_BOUND, self._takes_part)

    def _outcome(self, broken: str, concerned: tuple[NodeId, ...] = ()) -> SimulationResult:
        timeline = self._timeline
        record = timeline.last if broken or self._keeps_all else ()
        epochs = self.cluster.last.epoch
        return SimulationResult(
            self.seed, self.nodes, epochs, timeline.events, timeline.now, timeline.digest, broken, record, concerned
        )


@contextmanager
def _without_collection() -> Iterator[None]:
    """Pauses the garbage collector: a run keeps nearly all its objects, and traversing them takes a quarter of the
    time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class ChangeCache:
    """Applies changes, and caches the results. Nodes share memberships: otherwise this is most of the work."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, bytes], tuple[Membership, Membership]] = {}  # by identity of the membership before

    def __call__(self, change: Change, membership: Membership) -> Membership:
        key = (id(membership), change.encode())
        if key not in self._known:
            self._known[key] = (membership, change.apply(membership))  # both are kept, so the identity is not reused
        return self._known[key][1]


class GenerationCache:
    """Calls `next_generation`, and caches the results. Members of a generation share the next one."""

    def __init__(self) -> None:
        # By communicator, identities of both memberships, and number of changes: a joiner knows only the last ones.
        self._known: dict[tuple[int, int, int, int], _Following] = {}

    def __call__(
        self, communicator: int, membership: Membership, world: Membership, changes: Sequence[Change]
    ) -> Membership | None:
        key = (communicator, id(membership), id(world), len(changes))
        known = self._known.get(key)
        if known is None or known.changes != changes:
            found = next_generation(communicator, membership, world, changes)
            known = self._known[key] = _Following(membership, world, list(changes), found)
        return known.found


class _Following(NamedTuple):
    membership: Membership  # it and `world` are kept, so the identities are not reused
    world: Membership
    changes: list[Change]
    found: Membership | None


def random_policy(random: Random) -> RecoveryPolicy:
    """Mostly the default."""
    draw = random.random()
    if draw < 0.15:
        return "manual"
    return "abort" if draw < 0.25 else "automatic"


def random_program(random: Random) -> ApplicationPlan:
    """What the applications of a run do. In some runs they make more communicators than a node builds at a time."""
    return ApplicationPlan(
        seed=random.getrandbits(64),
        groups=random.choice([0, 0, 0, 1, 3, 24]),
        splits=random.choice([0.0, 0.2, 0.6]),
        closes=random.choice([0.0, 0.0, 0.05]),
        interval=random.choice([0.8, 2.0, 4.0, 8.0]),
        agrees=random.choice([0.0, 0.2, 0.6]),
    )


def node_machine(
    node: NodeId,
    membership: Membership,
    random: Random,
    *,
    active: bool = True,
    apply: Callable[[Change, Membership], Membership] = Change.apply,
    next_generation: NextGeneration = next_generation,
) -> NodeMachine:
    """The product's machine."""
    return NodeMachine(
        node,
        membership,
        recovery_timeout=RECOVERY_TIMEOUT,
        probe_timeout=PROBE_TIMEOUT,
        longest_probe=LONGEST_PROBE,
        active=active,
        random=random,
        apply=apply,
        next_generation=next_generation,
    )


# -- the shortest run that violates a law

_FEWEST_NODES: Final = 3
_SHOWN: Final = 60  # events

MakeSimulation: TypeAlias = Callable[[int, int, Sequence[int] | None], Simulation]
"""Creates a simulation of seed, number of nodes and indices of the faults (None: all) that keeps all events."""


def make_simulation(seed: int, nodes: int, faults: Sequence[int] | None) -> Simulation:
    """Runs the product's machines."""
    return Simulation(seed, nodes, only=faults, remembered=None)


@dataclass(frozen=True, slots=True)
class ShortHistory:
    """The smallest run that was found."""

    result: SimulationResult
    faults: tuple[str, ...]
    runs: int
    """How many runs were tried."""

    def __str__(self) -> str:
        result = self.result
        events = "".join(f"  {line}\n" for line in concerned_events(result))
        faults = "".join(f"  {fault}\n" for fault in self.faults)
        head = f"shortest history after {self.runs} runs: seed {result.seed}, {result.nodes} nodes"
        return f"{head}, {len(self.faults)} faults\n{faults}{events}BROKEN {result.broken}"


def concerned_events(result: SimulationResult, most: int = _SHOWN) -> list[str]:
    """The last events of the nodes that the violation names, and all faults; all events if it names none."""
    named = set(result.concerned)
    lines = [line for line in result.record if not named or _node_of(line) in named]
    return lines[-most:]


def _node_of(line: str) -> int | None:
    """The node of an event; None for faults and other events of no node."""
    found = re.match(r"\s*[\d.]+\s+(\d+)\b", line)
    return int(found.group(1)) if found else None


class _Search:
    """Runs until `until`, by the real clock."""

    def __init__(self, law: str, make: MakeSimulation, seconds: float) -> None:
        self.runs = 0
        self._law = law
        self._make = make
        self._until = time.monotonic() + seconds

    def run(self, seed: int, nodes: int, faults: Sequence[int] | None) -> tuple[Simulation, SimulationResult] | None:
        """The run if it violates the same law; None if it does not, or the time is over."""
        if time.monotonic() >= self._until:
            return None
        self.runs += 1
        simulation = self._make(seed, nodes, faults)
        result = simulation.run()
        return (simulation, result) if result.law == self._law else None


def shrink(
    result: SimulationResult, *, seconds: float = 60.0, make: MakeSimulation = make_simulation
) -> ShortHistory | None:
    """The smallest run found in this time; None if the law is not violated again."""
    search = _Search(result.law, make, seconds)
    found = search.run(result.seed, result.nodes, None)
    if found is None:
        return None
    for nodes in range(_FEWEST_NODES, result.nodes):
        smaller = search.run(result.seed, nodes, None)
        if smaller is not None:
            found = smaller
            break
    simulation, best = found
    kept = list(range(len(simulation.faults.planned)))
    kept, best = _fewer_faults(search, best, kept)
    faults = tuple(str(simulation.faults.planned[index]) for index in kept)
    return ShortHistory(best, faults, search.runs)


def _fewer_faults(search: _Search, best: SimulationResult, kept: list[int]) -> tuple[list[int], SimulationResult]:
    """Leaves out groups of faults, then smaller groups, as long as the law is violated."""
    size = max(1, len(kept) // 2)
    while kept:
        for start in range(0, len(kept), size):
            rest = kept[:start] + kept[start + size :]
            found = search.run(best.seed, best.nodes, rest)
            if found is not None:
                kept, best = rest, found[1]
                break
        else:
            if size == 1:
                break
            size = max(1, size // 2)
    return kept, best
