"""Systems take turns, size by size, block by block: what disturbs the machine disturbs all of them alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final, Protocol

from nexar.cli.bench.figures import Figure, figure, iterations_for
from nexar.cli.bench.measures import Measure
from nexar.cli.bench.order import Order, Reply

_FIRST_CALLS: Final = 5
_SETTLING: Final = 0.05
"""Seconds until ranks that woke up together run on cores of their own. Who spins while it waits suffers most before."""


class Ranks(Protocol):
    """A system's ranks, waiting for orders."""

    def ask(self, order: Order, patience: float) -> list[Reply]:
        """Every rank's reply, by rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """How long and how often."""

    dtype: str
    itemsize: int
    op: str
    root: int
    algorithm: str | None
    warmups: int
    least_calls: int
    exactly: bool
    """`least_calls` is also the most."""
    rounds: int
    seconds: float
    patience: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One size, all systems."""

    measure: str
    size_bytes: int
    count: int
    dtype: str
    op: str
    root: int
    figures: Mapping[str, Figure]
    problems: Mapping[str, str]
    """Why a system has no figure."""


def rows(
    systems: Mapping[str, Ranks], measure: Measure, sizes: Sequence[int], wishes: Wishes, ranks: int
) -> Iterator[Row]:
    """One row after the other, as soon as it is measured."""
    for count in counts(measure, sizes, wishes, ranks):
        yield row(systems, measure, count, wishes, ranks)


def counts(measure: Measure, sizes: Sequence[int], wishes: Wishes, ranks: int) -> tuple[int, ...]:
    """Of the rows to come. Sizes that come to the same count are measured once."""
    return tuple(dict.fromkeys(measure.count(size, wishes.itemsize, ranks) for size in sizes))


def row(systems: Mapping[str, Ranks], measure: Measure, count: int, wishes: Wishes, ranks: int) -> Row:
    """Each system once, to see how long a call takes and whether it is right; then in turns."""
    first = Order(
        measure=measure.name,
        count=count,
        dtype=wishes.dtype,
        op=wishes.op,
        root=wishes.root,
        algorithm=None,
        warmups=wishes.warmups,
        iterations=_FIRST_CALLS,
        check=True,
    )
    tried = {name: system.ask(_order_for(name, first, wishes), wishes.patience) for name, system in systems.items()}
    problems = {name: reason for name, replies in tried.items() if (reason := _problem(replies))}
    able = [name for name in systems if name not in problems]
    orders = {name: _block(_order_for(name, first, wishes), tried[name], wishes) for name in able}
    blocks: dict[str, list[list[Reply]]] = {name: [] for name in able}
    for number in range(wishes.rounds):
        for name in able[number % len(able) :] + able[: number % len(able)] if able else ():
            order = replace(orders[name], check=number == wishes.rounds - 1)
            blocks[name].append(systems[name].ask(order, wishes.patience))
    return Row(
        measure=measure.name,
        size_bytes=measure.size_bytes(count, wishes.itemsize, ranks),
        count=count,
        dtype=wishes.dtype if measure.sized else "",
        op=wishes.op if measure.reduces else "",
        root=wishes.root if measure.rooted else -1,
        figures={
            name: _with_wrong(figure(name, measure, count, wishes.itemsize, blocks[name]), tried[name]) for name in able
        },
        problems=problems,
    )


def _order_for(name: str, order: Order, wishes: Wishes) -> Order:
    """Only ours lets its algorithm be chosen."""
    return replace(order, algorithm=wishes.algorithm) if name == "nexar" else order


def _block(first: Order, tried: Sequence[Reply], wishes: Wishes) -> Order:
    seconds = max(median(reply.nanoseconds) for reply in tried if reply.nanoseconds) / 1e9
    if wishes.exactly:
        return replace(first, iterations=-(-wishes.least_calls // wishes.rounds))
    return replace(
        first,
        iterations=-(-iterations_for(seconds, wishes.seconds, wishes.least_calls) // wishes.rounds),
        warmups=iterations_for(seconds, _SETTLING, wishes.warmups),
    )


def _with_wrong(found: Figure, tried: Sequence[Reply]) -> Figure:
    return replace(found, wrong=found.wrong + sum(reply.wrong for reply in tried))


def _problem(replies: Sequence[Reply]) -> str:
    return next((reply.problem for reply in replies if reply.problem), "")
