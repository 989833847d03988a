"""Fixtures: endpoints that are closed at the end, connected pairs, and a check that nothing leaks."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from nexar_native import quic

sys.path.insert(0, str(Path(__file__).parent))  # pytest may have been started elsewhere, with other habits of importing

import certificates
from harness import Pair, connect, native_threads

MakeEndpoint = Callable[..., quic.Endpoint]


def _descriptors() -> set[str]:
    """What our open descriptors refer to; the directory being listed is not one of them."""
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{entry}:{os.readlink(f'/proc/self/fd/{entry}')}")
        except OSError:
            continue
    return {item for item in found if "/proc/" not in item and "anon_inode:[eventpoll]" not in item}


@pytest.fixture(autouse=True)
def _nothing_leaks() -> Iterator[None]:
    gc.collect()
    before = _descriptors()
    yield
    gc.collect()
    assert native_threads() == 0, "a background thread is left"
    left = {item for item in _descriptors() - before if "socket" in item or "eventfd" in item}
    assert not left, "descriptors are left"


@pytest.fixture
def make_endpoint(_nothing_leaks: None) -> Iterator[MakeEndpoint]:
    """Make endpoints by name; all are closed at the end."""
    made: list[quic.Endpoint] = []

    def make(
        name: str | None = "a",
        *,
        host: str = "127.0.0.1",
        trust: quic.Trust | None = None,
        credentials: quic.Credentials | None = None,
        **settings: object,
    ) -> quic.Endpoint:
        if credentials is None and name is not None:
            credentials = certificates.node(name).credentials
        chosen = quic.Settings(**settings)  # type: ignore[arg-type]
        endpoint = quic.Endpoint((host, 0), credentials, trust or certificates.trust(), chosen)
        made.append(endpoint)
        return endpoint

    yield make
    for endpoint in made:
        endpoint.close()
    made.clear()


@pytest.fixture
def pair(make_endpoint: MakeEndpoint) -> Iterator[Pair]:
    """Two endpoints in this process, "a" connected to "b"."""
    pair = connect(make_endpoint("a"), make_endpoint("b"))
    yield pair
    pair.forget()
