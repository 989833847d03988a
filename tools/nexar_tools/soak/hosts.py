"""The hosts of a soak: this one, or network namespaces with loss and partitions."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from random import Random
from typing import Final, Self

from nexar_tools.network_namespaces import NetworkNamespaces

_PARTITION_SECONDS: Final = (8.0, 15.0)  # at least; longer than the heartbeat timeout of an idle machine


class SoakHosts(AbstractContextManager["SoakHosts"]):
    """A `with` block with `count` hosts; the seed is on host 0, which is never isolated."""

    def __init__(self, count: int = 1, *, loss: float = 0.0, partition_seconds: float = 0.0) -> None:
        """`loss`: percent of the packets between hosts. A partition begins every `partition_seconds`; 0: never."""
        self.count: Final = count
        self._loss = loss
        self._interval = partition_seconds if count > 1 else 0.0
        self._network: NetworkNamespaces | None = None
        self._stack = ExitStack()
        self.isolated: int | None = None
        """The host that receives nothing and sends nothing now."""
        self.healed_at = 0.0
        self.partitions = 0
        self._due: float | None = None  # the next partition, or the end of this one

    def __enter__(self) -> Self:
        if self.count > 1:
            self._network = self._stack.enter_context(NetworkNamespaces(self.count))
            for host in range(self.count):
                self._restore(host)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def prefix(self, host: int) -> Sequence[str]:
        """The command that enters a host."""
        return () if self._network is None else self._network.places[host].prefix

    def is_due(self, now: float) -> bool:
        """Whether a partition should begin or end."""
        if self._due is None and self._interval:
            self._due = now + self._interval
        return self._due is not None and now >= self._due

    def isolate(self, host: int, now: float, rng: Random) -> None:
        assert self._network is not None
        for other in range(self.count):
            if other != host:
                self._network.deafen(host, other)
                self._network.deafen(other, host)
        self.isolated, self._due = host, now + rng.uniform(*_PARTITION_SECONDS)
        self.partitions += 1

    def heal(self, now: float) -> None:
        """The next partition begins after the interval."""
        for host in range(self.count):
            self._restore(host)
        self.isolated, self.healed_at, self._due = None, now, now + self._interval

    def _restore(self, host: int) -> None:
        assert self._network is not None
        self._network.clear(host)
        if self._loss:
            self._network.lose(host, self._loss)
