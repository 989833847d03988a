import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexar.transport.foreign_text import one_line
from nexar.transport.tls.hello import MAX_HELLO_BYTES, Half, Hello, HelloError, Verdict, decode_hello, encode_hello
from nexar.wire.frame import HEADER_BYTES, Frame, Kind, decode

hellos = st.builds(
    Hello,
    half=st.sampled_from(Half),
    token=st.binary(min_size=16, max_size=16),
    plain=st.booleans(),
    verdict=st.sampled_from(Verdict),
    reason=st.text(max_size=60).map(one_line),
)


def read(frame: bytes) -> Hello:
    return decode_hello(decode(frame), frame[HEADER_BYTES:])


@given(hellos)
def test_a_hello_is_read_as_it_was_written(hello: Hello) -> None:
    assert read(encode_hello(hello)) == hello


def test_a_long_reason_is_cut_to_what_fits() -> None:
    hello = Hello(Half.DATA, b"t" * 16, False, Verdict.REFUSED, "é" * 10_000)
    frame = encode_hello(hello)
    assert len(frame) == HEADER_BYTES + MAX_HELLO_BYTES
    assert read(frame).reason.startswith("éééé")


def test_a_reason_writes_nothing_into_our_logs_but_itself() -> None:
    hello = Hello(Half.DATA, b"t" * 16, False, Verdict.REFUSED, "no\nWARNING all is well\x1b[2J")
    assert read(encode_hello(hello)).reason == "no WARNING all is well [2J"


@given(st.binary(max_size=MAX_HELLO_BYTES + 10))
def test_no_bytes_lead_anywhere_but_to_a_hello_or_a_refusal(body: bytes) -> None:
    try:
        decode_hello(Frame(kind=Kind.HELLO, body=len(body)), body)
    except HelloError:
        return


def test_another_kind_of_frame_is_no_hello() -> None:
    frame = encode_hello(Hello(Half.DATA, b"t" * 16, False))
    with pytest.raises(HelloError, match="kind 8"):
        decode_hello(Frame(kind=Kind.CONTROL), frame[HEADER_BYTES:])
