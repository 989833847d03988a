import ssl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexar.transport.tls.handshake import (
    MAX_HELLO_BYTES,
    ConnectionHello,
    Half,
    HelloAnswer,
    HelloError,
    decode_connection_hello,
    encode_connection_hello,
    explain,
)
from nexar.wire.frame import HEADER_BYTES, Frame, FrameKind, decode
from nexar.wire.text import foreign_line

hellos = st.builds(
    ConnectionHello,
    half=st.sampled_from(Half),
    token=st.binary(min_size=16, max_size=16),
    plain=st.booleans(),
    answer=st.sampled_from(HelloAnswer),
    reason=st.text(max_size=60).map(foreign_line),
)


def read(frame: bytes) -> ConnectionHello:
    return decode_connection_hello(decode(frame), frame[HEADER_BYTES:])


@given(hellos)
def test_a_hello_is_read_as_it_was_written(hello: ConnectionHello) -> None:
    assert read(encode_connection_hello(hello)) == hello


def test_a_long_reason_is_cut_to_what_fits() -> None:
    hello = ConnectionHello(Half.DATA, b"t" * 16, False, HelloAnswer.REFUSED, "é" * 10_000)
    frame = encode_connection_hello(hello)
    assert len(frame) == HEADER_BYTES + MAX_HELLO_BYTES
    assert read(frame).reason.startswith("éééé")


def test_a_reason_writes_nothing_into_our_logs_but_itself() -> None:
    hello = ConnectionHello(Half.DATA, b"t" * 16, False, HelloAnswer.REFUSED, "no\nWARNING all is well\x1b[2J")
    assert read(encode_connection_hello(hello)).reason == "no WARNING all is well [2J"


@given(st.binary(max_size=MAX_HELLO_BYTES + 10))
def test_no_bytes_lead_anywhere_but_to_a_hello_or_a_refusal(body: bytes) -> None:
    try:
        decode_connection_hello(Frame(kind=FrameKind.HELLO, body=len(body)), body)
    except HelloError:
        return


def test_another_kind_of_frame_is_no_hello() -> None:
    frame = encode_connection_hello(ConnectionHello(Half.DATA, b"t" * 16, False))
    with pytest.raises(HelloError, match="kind 8"):
        decode_connection_hello(Frame(kind=FrameKind.CONTROL), frame[HEADER_BYTES:])


@pytest.mark.parametrize(
    ("name", "verification"),
    [
        ("TLSV1_ALERT_UNKNOWN_CA", True),
        ("PEER_DID_NOT_RETURN_A_CERTIFICATE", True),
        ("TLSV1_ALERT_INTERNAL_ERROR", False),
        ("WRONG_VERSION_NUMBER", False),
        (None, False),
    ],
)
def test_openssls_name_of_an_error_decides_and_not_its_text(name: str | None, verification: bool) -> None:
    error = ssl.SSLError(1, "TLSV1_ALERT_UNKNOWN_CA: the CERTIFICATE is none")
    error.reason = name  # type: ignore[assignment]
    assert explain(error).verification is verification
