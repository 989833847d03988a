"""Which transports there are here."""

import sys

from nexar.testing.availability import why_absent


def test_what_needs_nothing_is_always_there():
    assert [why_absent(scheme) for scheme in ("tls", "tcp", "memory")] == [None, None, None]


def test_without_the_native_package_the_reason_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "nexar_quic", None)
    assert "nexar-quic" in str(why_absent("quic"))


def test_on_another_machine_shared_memory_says_what_it_needs(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert "riscv64" in str(why_absent("shm"))
