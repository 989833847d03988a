"""Reads the ranks' files in a directory, and finds ranks of the world, by which all output names nodes."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from nexar.security.storage import open_nonblocking
from nexar.types import Rank

ContentT = TypeVar("ContentT")


class RankFiles(NamedTuple, Generic[ContentT]):
    """The files of a directory."""

    read: tuple[ContentT, ...]
    """Sorted by file name."""
    unreadable: dict[str, str]
    """File name → reason."""


def read_rank_files(
    directory: Path, suffix: str, decode: Callable[[bytes], ContentT], largest_bytes: int
) -> RankFiles[ContentT]:
    """Ignores subdirectories. `decode` raises ValueError for other content."""
    read: list[ContentT] = []
    unreadable: dict[str, str] = {}
    for path in sorted(directory.glob(f"*{suffix}")):
        try:
            read.append(decode(_content(path, largest_bytes)))
        except (OSError, ValueError) as error:
            unreadable[path.name] = str(error)
    return RankFiles(tuple(read), unreadable)


def _content(path: Path, largest_bytes: int) -> bytes:
    with open_nonblocking(path) as file:
        status = os.fstat(file.fileno())  # of the open file: the name may belong to another one by now
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a regular file")
        if status.st_size > largest_bytes:
            raise ValueError(f"it is larger than {largest_bytes} bytes")
        return file.read()


NodeT = TypeVar("NodeT", bound=Hashable)


class WorldNode(NamedTuple, Generic[NodeT]):
    """One node in one generation of the world."""

    generation: int
    node: NodeT
    rank: Rank


def world_ranks(seen: Iterable[WorldNode[NodeT]], generation: int) -> dict[NodeT, Rank]:
    """Node → rank in the world's last generation up to this one, else in the next one."""

    def nearness(each: WorldNode[NodeT]) -> tuple[bool, int]:
        before = each.generation <= generation
        return before, each.generation if before else -each.generation

    return {each.node: each.rank for each in sorted(seen, key=nearness)}
