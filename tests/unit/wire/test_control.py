"""Control messages come back as they were; what is not one is distinguished from what is not known yet."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexar.wire.control import (
    KNOWN,
    MAX_CAUSE_CHARACTERS,
    MAX_MESSAGE_BYTES,
    MAX_NAMED,
    Accept,
    Accepted,
    BallotNumber,
    Beat,
    Blamed,
    CallAborted,
    CallMismatch,
    Chosen,
    CommunicatorClosed,
    CurrentCall,
    Declined,
    Goodbye,
    Introduce,
    Introduced,
    Message,
    MessageError,
    Ping,
    Pong,
    Prepare,
    ProgressQuery,
    ProgressReply,
    Promise,
    Rejected,
    Revoke,
    StateOffer,
    Suspect,
    Unknown,
    decode,
    encode,
)

numbers = st.integers(-(2**63), 2**64 - 1)
texts = st.text(max_size=200)
seconds = st.floats(0.0, 1e12)
culprits = st.builds(Blamed, numbers, texts, st.none() | texts, st.none() | seconds)
instances = st.tuples(numbers, numbers, numbers)
ballots = st.builds(BallotNumber, numbers, numbers)
values = st.binary(max_size=100)
doing = st.lists(st.builds(CurrentCall, numbers, texts, numbers, numbers, seconds), max_size=3).map(tuple)
messages = st.one_of(
    st.builds(Ping, numbers),
    st.builds(Pong, numbers),
    st.builds(CommunicatorClosed, numbers, numbers, numbers),
    st.builds(Goodbye, texts, st.one_of(st.none(), texts)),
    st.builds(Introduce, numbers, numbers),
    st.builds(Introduced, numbers, numbers, texts),
    st.builds(Declined, texts, st.booleans()),
    st.builds(CallMismatch, numbers, numbers, numbers, st.dictionaries(numbers, st.tuples(*[numbers] * 6), max_size=4)),
    st.builds(
        CallAborted, numbers, numbers, numbers, numbers, texts, seconds, st.lists(culprits, max_size=3).map(tuple)
    ),
    st.builds(ProgressQuery, numbers, numbers, numbers, numbers, st.tuples(*[numbers] * 6)),
    st.builds(
        ProgressReply, numbers, numbers, numbers, numbers, st.sampled_from(["absent", "in", "done", "failed"]), numbers,
        seconds, texts, st.none() | texts,
    ),
    st.builds(Beat, numbers, doing, texts),
    st.builds(Suspect, numbers, numbers, numbers, texts),
    st.builds(Prepare, instances, ballots),
    st.builds(Promise, instances, ballots, st.none() | ballots, values),
    st.builds(Accept, instances, ballots, values, st.booleans()),
    st.builds(Accepted, instances, ballots),
    st.builds(Rejected, instances, ballots, st.none() | ballots, st.lists(numbers, max_size=3).map(tuple)),
    st.builds(Chosen, instances, values),
    st.builds(Revoke, numbers, numbers, numbers, texts),
    st.builds(StateOffer, numbers, numbers),
)  # fmt: skip


@given(messages)
def test_decoding_undoes_encoding(message: Message) -> None:
    assert decode(encode(message)) == message
    assert decode(memoryview(encode(message))) == message


@given(st.binary(max_size=300))
def test_any_bytes_are_a_message_or_unknown_or_an_error(data: bytes) -> None:
    try:
        found = decode(data)
    except MessageError:
        return
    assert isinstance(found, (*KNOWN, Unknown))


@given(messages, st.data())
def test_a_truncated_message_is_an_error(message: Message, data: st.DataObject) -> None:
    whole = encode(message)
    with pytest.raises(MessageError):
        decode(whole[: data.draw(st.integers(0, len(whole) - 1))])


def test_a_message_of_the_future_is_unknown_and_no_error() -> None:
    assert decode(msgspec.msgpack.encode({"type": "teleport", "where": [1, 2]})) == Unknown("teleport")


def test_a_field_of_the_future_is_ignored() -> None:
    assert decode(msgspec.msgpack.encode({"type": "ping", "number": 3, "mood": "good"})) == Ping(3)


@pytest.mark.parametrize(
    "value", [{"type": "ping"}, {"type": "ping", "number": "three"}, {"number": 3}, [], 3, {"type": 5}, None]
)
def test_a_malformed_message_is_an_error(value: object) -> None:
    with pytest.raises(MessageError):
        decode(msgspec.msgpack.encode(value))


def test_a_message_above_the_limit_is_neither_sent_nor_read() -> None:
    with pytest.raises(MessageError):
        encode(Goodbye("x" * MAX_MESSAGE_BYTES))
    with pytest.raises(MessageError):
        decode(msgspec.msgpack.encode({"type": "goodbye", "reason": "x" * MAX_MESSAGE_BYTES}))


def test_a_cause_above_its_limit_is_an_error() -> None:
    long = Revoke(0, 1, 2, "x" * (MAX_CAUSE_CHARACTERS + 1))
    with pytest.raises(MessageError):
        decode(encode(long))


def test_a_deeply_nested_message_is_an_error_and_no_crash() -> None:
    nested = b"\x82\xa4type\xa4ping\xa6number" + b"\x91" * 500_000 + b"\x01"
    with pytest.raises(MessageError):
        decode(nested)
    assert isinstance(
        _decode_or_error(b"\x82\xa4type\xa6future\xa1x" + b"\x91" * 500_000 + b"\x01"), Unknown | MessageError
    )


def _decode_or_error(data: bytes) -> object:
    try:
        return decode(data)
    except MessageError as error:
        return error


def test_tags_are_the_wire_format() -> None:
    assert [message.__struct_config__.tag for message in KNOWN] == [
        "ping",
        "pong",
        "goodbye",
        "introduce",
        "introduced",
        "declined",
        "disagreed",
        "gave_up",
        "inquire",
        "report",
        "beat",
        "suspect",
        "prepare",
        "promise",
        "accept",
        "accepted",
        "rejected",
        "chosen",
        "revoke",
        "offer",
        "unheard",
    ]


@pytest.mark.parametrize("count", [MAX_NAMED, MAX_NAMED + 1])
def test_a_message_names_as_many_members_as_there_may_be_and_no_more(count: int) -> None:
    """Of whom the hearer makes a dict or a set."""
    call = (0, 0, 0, 0, 0, 0)
    bodies = [
        encode(CallMismatch(0, 1, 1, dict.fromkeys(range(count), call))),
        encode(Rejected((0, 1, 0), BallotNumber(1, 1), None, tuple(range(count)))),
    ]
    for body in bodies:
        if count > MAX_NAMED:
            with pytest.raises(MessageError, match="malformed"):
                decode(body)
        else:
            decode(body)
