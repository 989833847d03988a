"""Fixtures: endpoints with a TCP port, connected channels, and a check that nothing leaks."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parent.parent / "quic"))  # the certificates are those of the QUIC tests

from bulk_peers import Channels, Peer, connect, native_threads

MakePeer = Callable[..., Peer]


def _descriptors() -> set[str]:
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{entry}:{os.readlink(f'/proc/self/fd/{entry}')}")
        except OSError:
            continue
    return found


@pytest.fixture(autouse=True)
def _nothing_leaks() -> Iterator[None]:
    gc.collect()
    before = _descriptors()
    yield
    gc.collect()
    assert native_threads() == 0, "a worker is left"
    left = {item for item in _descriptors() - before if "socket" in item or "anon_inode" in item}
    assert not left, "descriptors are left"


@pytest.fixture
def make_peer(_nothing_leaks: None) -> Iterator[MakePeer]:
    made: list[Peer] = []

    def make(name: str = "a", **options: object) -> Peer:
        peer = Peer(name, **options)  # type: ignore[arg-type]
        made.append(peer)
        return peer

    yield make
    for peer in made:
        peer.close()
    made.clear()


@pytest.fixture(params=["encrypted", "plain"])
def plain(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "plain")


@pytest.fixture
def channels(make_peer: MakePeer, plain: bool) -> Channels:
    """A channel of three connections from "a" to "b"; two workers a side."""
    return connect(make_peer("a"), make_peer("b"), connections=3, plain=plain)
