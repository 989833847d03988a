"""A hello comes back as it was, and another version is recognised before anything else is read."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexar.errors import VersionMismatch
from nexar.security.proof import NONCE_BYTES
from nexar.wire.hello import (
    MAX_CAPABILITIES,
    MAX_HELLO_BYTES,
    PROTOCOL_VERSION,
    HandshakeError,
    Hello,
    Role,
    decode_hello,
    encode_hello,
    version_of,
)

hellos = st.builds(
    Hello,
    node=st.integers(0, 2**64 - 1),
    role=st.sampled_from(["member", "candidate", "seed", "launcher"]),
    capabilities=st.frozensets(st.text(max_size=20), max_size=10),
    nonce=st.binary(min_size=NONCE_BYTES, max_size=NONCE_BYTES),
)


@given(hellos)
def test_decoding_undoes_encoding(hello: Hello) -> None:
    assert decode_hello(encode_hello(hello)) == hello
    assert decode_hello(memoryview(encode_hello(hello))) == hello


@given(st.integers(0, 2**16 - 1), st.binary(max_size=100))
def test_the_version_is_read_whatever_follows_it(version: int, rest: bytes) -> None:
    prefix = encode_hello(Hello(1, "member"), version)[:4]
    assert version_of(prefix + rest) == version


@given(hellos, st.integers(PROTOCOL_VERSION + 1, 2**16 - 1))
def test_another_version_is_refused_and_both_are_named(hello: Hello, version: int) -> None:
    with pytest.raises(VersionMismatch) as refused:
        decode_hello(encode_hello(hello, version)[:4] + b"\xff what nobody can read")
    assert (refused.value.ours, refused.value.theirs) == (PROTOCOL_VERSION, version)


@given(st.binary(max_size=300))
def test_any_bytes_are_a_hello_or_an_error(data: bytes) -> None:
    for body in (data, encode_hello(Hello(1, "member"))[:4] + data):
        with suppress(HandshakeError, VersionMismatch):
            assert isinstance(decode_hello(body), Hello)


@given(hellos, st.data())
def test_a_truncated_hello_is_an_error(hello: Hello, data: st.DataObject) -> None:
    whole = encode_hello(hello)
    with pytest.raises(HandshakeError):
        decode_hello(whole[: data.draw(st.integers(0, len(whole) - 1))])


def test_a_hello_above_the_limit_is_neither_sent_nor_read() -> None:
    large = Hello(1, "candidate", nonce=bytes(MAX_HELLO_BYTES))
    with pytest.raises(HandshakeError):
        encode_hello(large)
    with pytest.raises(HandshakeError):
        decode_hello(encode_hello(Hello(1, "candidate"))[:4] + bytes(MAX_HELLO_BYTES))


def test_a_node_id_beyond_64_bits_is_refused() -> None:
    with pytest.raises(HandshakeError):
        decode_hello(encode_hello(Hello(-1, "member")))


@pytest.mark.parametrize("role", ["candidate", "launcher"])
@pytest.mark.parametrize("length", [0, 1, NONCE_BYTES - 1, NONCE_BYTES + 1])
def test_who_wants_to_join_brings_a_whole_nonce(role: Role, length: int) -> None:
    with pytest.raises(HandshakeError):
        decode_hello(encode_hello(Hello(1, role, nonce=bytes(length))))


@pytest.mark.parametrize("capabilities", [{str(number) for number in range(MAX_CAPABILITIES + 1)}, {"x" * 65}])
def test_capabilities_are_few_and_short(capabilities: set[str]) -> None:
    with pytest.raises(HandshakeError, match="capabilities"):
        decode_hello(encode_hello(Hello(1, "member", frozenset(capabilities))))


def test_a_member_may_come_without_a_nonce_but_not_with_half_of_one() -> None:
    assert decode_hello(encode_hello(Hello(1, "member"))).nonce == b""
    with pytest.raises(HandshakeError):
        decode_hello(encode_hello(Hello(1, "member", nonce=bytes(16))))


def test_two_nodes_use_what_both_can() -> None:
    ours = Hello(1, "member", frozenset({"quic", "tls", "shm"}))
    theirs = Hello(2, "member", frozenset({"tls", "shm", "teleport"}))
    assert ours.common(theirs) == theirs.common(ours) == {"tls", "shm"}
