"""Whatever somebody makes of a join message or a hello, it is one, of another version, or refused; nothing else."""

import contextlib

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from nexar.errors import VersionMismatch
from nexar.security.proof import NONCE_BYTES
from nexar.wire.hello import HandshakeError, Hello, add_prefix, decode_hello, encode_hello
from nexar.wire.join import KNOWN_JOIN, MAX_JOIN_BYTES, MAX_UNVERIFIED_BYTES, JoinMessage, decode_join, encode_join
from tests.unit.wire.join_messages import messages

_PREFIX = add_prefix(b"", MAX_JOIN_BYTES)
changes = st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), min_size=1, max_size=6)


def _read(body: bytes) -> None:
    for limit in (MAX_UNVERIFIED_BYTES, MAX_JOIN_BYTES):
        with contextlib.suppress(HandshakeError, VersionMismatch):
            assert isinstance(decode_join(body, limit), KNOWN_JOIN)
    with contextlib.suppress(HandshakeError, VersionMismatch):
        assert isinstance(decode_hello(body), Hello)


def _tampered(body: bytes, where: list[tuple[int, int]]) -> bytes:
    changed = bytearray(body)
    for place, value in where:
        changed[place % len(changed)] = value
    return bytes(changed)


@given(messages, changes)
def test_a_join_message_with_some_bytes_changed(message: JoinMessage, where: list[tuple[int, int]]) -> None:
    _read(_tampered(encode_join(message), where))


@given(st.integers(0, 2**64 - 1), changes)
def test_a_hello_with_some_bytes_changed(node: int, where: list[tuple[int, int]]) -> None:
    _read(_tampered(encode_hello(Hello(node, "candidate", frozenset({"quic"}), bytes(NONCE_BYTES))), where))


@given(messages, messages, st.integers(0, 300))
def test_two_join_messages_spliced(one: JoinMessage, other: JoinMessage, cut: int) -> None:
    _read(encode_join(one)[:cut] + encode_join(other)[cut:])
    _read(encode_join(one) + encode_join(other))


@given(st.binary(max_size=400))
def test_any_bytes_at_all(data: bytes) -> None:
    _read(data)
    _read(_PREFIX + data)


anything = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(), st.binary()),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
    max_leaves=12,
)


@given(st.sampled_from(KNOWN_JOIN), st.data())
def test_a_known_message_with_any_values_in_its_fields(kind: type[JoinMessage], data: st.DataObject) -> None:
    fields = data.draw(st.fixed_dictionaries({}, optional=dict.fromkeys(kind.__struct_fields__, anything)))
    body = msgspec.msgpack.encode({"type": kind.__struct_config__.tag, **fields})
    _read(add_prefix(body, 2 * MAX_JOIN_BYTES))


def test_nesting_without_end_is_refused() -> None:
    for start in (b"\x82\xa4type\xa5apply\xa9addresses", b"\x82\xa4type\xa5leave\xa6future", b""):
        _read(_PREFIX + start + b"\x91" * 500_000 + b"\x01")
