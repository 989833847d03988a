"""Join messages come back as they were; another version, nonsense and impossible values are distinguished."""

from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexar.errors import VersionMismatch
from nexar.security.proof import NONCE_BYTES, PROOF_BYTES
from nexar.wire.hello import PROTOCOL_VERSION, HandshakeError, Hello, add_prefix, encode_hello
from nexar.wire.join import (
    KNOWN_JOIN,
    MAX_ADDRESSES,
    MAX_JOIN_BYTES,
    MAX_RANKS,
    MAX_REASON_CHARACTERS,
    MAX_UNVERIFIED_BYTES,
    Challenge,
    ChildDied,
    Committed,
    FormationFailed,
    JoinMessage,
    JoinRefusedMessage,
    JoinRequest,
    Leave,
    MemberDied,
    ReserveRanks,
    check_node,
    count_addresses,
    decode_join,
    encode_join,
)
from tests.unit.wire.join_messages import messages

PROOF = bytes(PROOF_BYTES)
APPLY = JoinRequest(
    PROOF, b"request", "host-a", {"quic": ("10.0.0.1:4000", "[::1]:4000"), "tls": ("10.0.0.1:4000",)}, 3, 7
)


@dataclass(frozen=True)
class Changed:
    """A message in order but for one field."""

    message: JoinMessage
    field: str
    value: Any

    def encoded(self) -> bytes:
        fields = msgspec.to_builtins(self.message, builtin_types=(bytes,)) | {self.field: self.value}
        return add_prefix(msgspec.msgpack.encode(fields), MAX_JOIN_BYTES)


@given(messages)
def test_decoding_undoes_encoding(message: JoinMessage) -> None:
    assert decode_join(encode_join(message), MAX_JOIN_BYTES) == message
    assert decode_join(memoryview(encode_join(message)), MAX_JOIN_BYTES) == message


@given(messages, st.data())
def test_a_truncated_message_is_an_error(message: JoinMessage, data: st.DataObject) -> None:
    whole = encode_join(message)
    with pytest.raises(HandshakeError):
        decode_join(whole[: data.draw(st.integers(0, len(whole) - 1))], MAX_JOIN_BYTES)


@given(messages, st.integers(PROTOCOL_VERSION + 1, 2**16 - 1))
def test_any_message_of_another_version_names_both_versions(message: JoinMessage, version: int) -> None:
    with pytest.raises(VersionMismatch) as refused:
        decode_join(encode_join(message, version)[:4] + b"\xff what nobody can read", MAX_UNVERIFIED_BYTES)
    assert (refused.value.ours, refused.value.theirs) == (PROTOCOL_VERSION, version)


def test_tags_are_the_wire_format() -> None:
    assert [message.__struct_config__.tag for message in KNOWN_JOIN] == [
        "challenge", "apply", "reserve", "welcome", "ready", "committed", "formation_failed", "refused", "renew",
        "renewed", "child_died", "leave", "current", "word", "died", "are_you_there", "here", "waiting",
        "watch", "look", "shown", "news", "connected", "start_failed", "started", "inquire", "progress", "run_failed",
    ]  # fmt: skip


def test_a_second_hello_is_no_join_message() -> None:
    with pytest.raises(HandshakeError):
        decode_join(encode_hello(Hello(1, "candidate", nonce=bytes(NONCE_BYTES))), MAX_UNVERIFIED_BYTES)


def test_a_message_nobody_knows_is_an_error() -> None:
    with pytest.raises(HandshakeError, match="teleport"):
        decode_join(add_prefix(msgspec.msgpack.encode({"type": "teleport"}), MAX_JOIN_BYTES), MAX_JOIN_BYTES)


def test_a_field_of_the_future_is_ignored() -> None:
    assert decode_join(Changed(Leave("done"), "mood", "good").encoded(), MAX_JOIN_BYTES) == Leave("done")


def test_what_may_be_left_out_has_its_default() -> None:
    plain = msgspec.msgpack.encode({"type": "reserve", "proof": PROOF, "request": b"r", "host": "a", "count": 2})
    assert decode_join(add_prefix(plain, MAX_JOIN_BYTES), MAX_UNVERIFIED_BYTES) == ReserveRanks(
        PROOF, b"r", "a", 2, None
    )


@pytest.mark.parametrize(
    "changed",
    [
        Changed(Challenge(bytes(NONCE_BYTES), PROOF), "nonce", bytes(NONCE_BYTES - 1)),
        Changed(Challenge(bytes(NONCE_BYTES), PROOF), "proof", bytes(PROOF_BYTES + 1)),
        Changed(APPLY, "proof", b""),
        Changed(APPLY, "request", b""),
        Changed(APPLY, "request", bytes(3000)),
        Changed(APPLY, "host", ""),
        Changed(APPLY, "host", "a" * 256),
        Changed(APPLY, "host", "a\nSeed: all is well"),
        Changed(APPLY, "host", "a\n"),
        Changed(APPLY, "rank", -1),
        Changed(APPLY, "rank", MAX_RANKS),
        Changed(APPLY, "rank", "0"),
        Changed(APPLY, "launcher", -1),
        Changed(APPLY, "clock", float("inf")),
        Changed(APPLY, "clock", float("nan")),
        Changed(APPLY, "addresses", []),
        Changed(APPLY, "addresses", {"quic": ["x"] * (MAX_ADDRESSES + 1)}),
        Changed(APPLY, "addresses", {f"s{number}": [] for number in range(MAX_ADDRESSES + 1)}),
        Changed(APPLY, "addresses", {"QUIC": ["x"]}),
        Changed(APPLY, "addresses", {"quic": [""]}),
        Changed(APPLY, "addresses", {"quic": ["x" * 513]}),
        Changed(APPLY, "addresses", {"quic": ["x\x1b[2J"]}),
        Changed(ReserveRanks(PROOF, b"r", "a", 2), "count", 0),
        Changed(ReserveRanks(PROOF, b"r", "a", 2), "count", MAX_RANKS + 1),
        Changed(ReserveRanks(PROOF, b"r", "a", 2), "first_rank", -1),
        Changed(Committed(b"m"), "membership", b""),
        Changed(JoinRefusedMessage("no"), "reason", "x" * (MAX_REASON_CHARACTERS + 1)),
        Changed(JoinRefusedMessage("no"), "reason", "no\r\nyes"),
        Changed(JoinRefusedMessage("no"), "code", "not elastic"),
        Changed(FormationFailed((), 2, {}, 1.0), "timeout", -1.0),
        Changed(FormationFailed((), 2, {}, 1.0), "refused", {str(number): "" for number in range(257)}),
        Changed(ChildDied(0, "boom"), "cause", "x" * (65 << 10)),
        Changed(MemberDied(1, 1, "boom"), "reported_by", "a word with\nanother line"),
        Changed(MemberDied(1, 1, "boom"), "reported_by", "x" * 33),
    ],
    ids=lambda changed: f"{type(changed.message).__name__}.{changed.field}",
)
def test_a_field_that_says_what_cannot_be_is_an_error(changed: Changed) -> None:
    with pytest.raises(HandshakeError):
        decode_join(changed.encoded(), MAX_JOIN_BYTES)


def test_a_seed_that_does_not_say_who_reported_a_death_is_understood() -> None:
    old = Changed(MemberDied(1, 1, "boom"), "cause", "bang").encoded()
    assert b"reported_by" not in old
    assert decode_join(old, MAX_JOIN_BYTES) == MemberDied(1, 1, "bang", reported_by="")


def test_a_traceback_may_have_many_lines() -> None:
    died = ChildDied(2, "Traceback (most recent call last):\n  boom\n")
    assert decode_join(encode_join(died), MAX_JOIN_BYTES) == died


def test_nothing_above_the_limit_of_an_unauthenticated_peer_is_sent_or_read_before_the_proof() -> None:
    talkative = JoinRequest(PROOF, b"r", "a", {"quic": tuple(f"{number:0>100}" for number in range(MAX_ADDRESSES))})
    with pytest.raises(HandshakeError, match="allowed are 4096"):
        encode_join(talkative)
    large = encode_join(Committed(bytes(MAX_UNVERIFIED_BYTES)))
    with pytest.raises(HandshakeError, match="allowed are"):
        decode_join(large, MAX_UNVERIFIED_BYTES)
    assert decode_join(large, MAX_JOIN_BYTES) == Committed(bytes(MAX_UNVERIFIED_BYTES))


def test_nothing_above_the_limit_is_sent_or_read_afterwards() -> None:
    with pytest.raises(HandshakeError):
        encode_join(Committed(bytes(MAX_JOIN_BYTES)))
    with pytest.raises(HandshakeError):
        decode_join(add_prefix(bytes(MAX_JOIN_BYTES), 2 * MAX_JOIN_BYTES), MAX_JOIN_BYTES)


def test_a_sender_learns_of_too_many_addresses_before_it_sends_them() -> None:
    with pytest.raises(ValueError, match="65 addresses"):
        JoinRequest(PROOF, b"r", "a", {"quic": ("x",) * (MAX_ADDRESSES + 1)})
    assert count_addresses(APPLY.addresses) == 3


@pytest.mark.parametrize("node", [-1, 0, 2**64])
def test_an_id_that_no_node_has_is_refused(node: int) -> None:
    with pytest.raises(ValueError, match="not the id of a node"):
        check_node(node)


def test_every_id_of_64_bits_can_be_the_launcher() -> None:
    assert check_node(2**64 - 1) == 2**64 - 1
    child = JoinRequest(PROOF, b"r", "a", {}, 0, 2**64 - 1)
    assert decode_join(encode_join(child), MAX_UNVERIFIED_BYTES) == child
