import pytest

from nexar.cli.doctor.observations import (
    ConclusionMessage,
    DoctorFinding,
    NotAProbeMessage,
    ProbeReply,
    ProbeRequest,
    ReportMessage,
    decode_probe,
    encode_probe,
)
from nexar.wire.control import MAX_MESSAGE_BYTES, Introduce
from nexar.wire.control import encode as encode_message
from tests.unit.cli.doctor.seen import report


@pytest.mark.parametrize(
    "said",
    [
        ProbeRequest(3),
        ProbeReply(3, 1.5),
        ReportMessage(report(0, "a", (1, "quic", 50e-6))),
        ConclusionMessage((DoctorFinding("open port 1"),)),
    ],
)
def test_what_one_doctor_sends_the_other_receives(said):
    assert decode_probe(encode_probe(said)) == said


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", encode_message(Introduce(rank=0, epoch=1)), bytes(MAX_MESSAGE_BYTES + 1)]
)
def test_what_no_doctor_says_is_refused(body):
    with pytest.raises(NotAProbeMessage):
        decode_probe(body)
