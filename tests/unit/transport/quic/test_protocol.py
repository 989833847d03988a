import pytest

from nexar.transport.quic.protocol import (
    PREAMBLE_BYTES,
    Preamble,
    PreambleError,
    StreamType,
    decode_preamble,
    encode_preamble,
)


@pytest.mark.parametrize("stream_type", StreamType)
def test_a_preamble_says_what_was_put_into_it(stream_type):
    encoded = encode_preamble(stream_type, 2**64 - 1, lane=4, size=2**63)
    assert len(encoded) == PREAMBLE_BYTES
    assert decode_preamble(encoded) == Preamble(stream_type, 4, 2**64 - 1, 2**63)


def test_an_unknown_type_is_refused_by_its_number():
    with pytest.raises(PreambleError, match="unknown type 77"):
        decode_preamble(bytes([1, 77]) + bytes(PREAMBLE_BYTES - 2))


def test_another_version_is_refused_by_its_number():
    with pytest.raises(PreambleError, match="version 9"):
        decode_preamble(bytes([9, 1]) + bytes(PREAMBLE_BYTES - 2))
