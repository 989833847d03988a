import pytest

from nexar.cli.doctor.observations import Finding
from nexar.cli.doctor.questions import Answer, Ask, Conclude, Hand, NotADoctor, decode, encode
from nexar.wire.messages import MAX_MESSAGE_BYTES, Introduce
from nexar.wire.messages import encode as encode_message
from tests.unit.cli.doctor.seen import report


@pytest.mark.parametrize(
    "said", [Ask(3), Answer(3, 1.5), Hand(report(0, "a", (1, "quic", 50e-6))), Conclude((Finding("open port 1"),))]
)
def test_what_one_doctor_says_the_other_hears(said):
    assert decode(encode(said)) == said


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", encode_message(Introduce(rank=0, epoch=1)), bytes(MAX_MESSAGE_BYTES + 1)]
)
def test_what_no_doctor_says_is_refused(body):
    with pytest.raises(NotADoctor):
        decode(body)
