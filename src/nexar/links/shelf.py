"""First in, first out, per key: the container of matching. Most keys hold one thing at a time: that case is cheap."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

Key = tuple[int, int, int]


class Ordered(Protocol):
    """What can stand on a shelf."""

    order: int


T = TypeVar("T", bound=Ordered)


class Shelf(Generic[T]):
    """A queue for each key, in order of `order`; an empty queue leaves no trace."""

    __slots__ = ("_more", "first", "oldest")

    def __init__(self) -> None:
        self.oldest: dict[Key, T] = {}
        """The oldest thing of each key, to look at: empty if the shelf is."""
        self._more: dict[Key, list[T]] = {}  # what came after it
        self.first: Callable[[Key], T | None] = self.oldest.get
        """The oldest thing of this key, left where it is."""

    def __len__(self) -> int:
        return len(self.oldest) + sum(len(queue) for queue in self._more.values())

    def put(self, key: Key, thing: T) -> None:
        """In its place by order: usually behind everything, further ahead if it was taken before and comes back."""
        first = self.oldest.setdefault(key, thing)
        if first is thing:
            return
        if thing.order < first.order:
            self.oldest[key] = thing
            thing = first
        insort(self._more.setdefault(key, []), thing, key=_order)

    def drop_first(self, key: Key) -> None:
        """The oldest thing of this key, which `first` has shown, goes."""
        del self.oldest[key]
        if self._more and key in self._more:
            self._promote(key)

    def remove(self, key: Key, thing: T) -> bool:
        """Take this very thing out, wherever it stands. False if it is not here."""
        if self.first(key) is thing:
            self.drop_first(key)
            return True
        queue = self._more.get(key, [])
        if thing not in queue:
            return False
        queue.remove(thing)
        if not queue:
            del self._more[key]
        return True

    def heads(self) -> Iterator[tuple[Key, T]]:
        """The oldest thing of every key."""
        return iter(list(self.oldest.items()))

    def everything(self) -> list[T]:
        """All of it, oldest first within a key."""
        return [*self.oldest.values(), *(thing for queue in self._more.values() for thing in queue)]

    def _promote(self, key: Key) -> None:
        queue = self._more[key]
        self.oldest[key] = queue.pop(0)
        if not queue:
            del self._more[key]


def _order(thing: Ordered) -> int:
    return thing.order
