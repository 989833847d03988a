from nexar.security.credentials import Credentials
from nexar.transport.base import Expected
from nexar.transport.disbelief import advice
from nexar.types import UNKNOWN_NODE

OURS = Credentials(0xA, "blue", b"chain", b"secret")


def test_a_member_hears_whom_it_expected_what_it_showed_and_what_to_check():
    said = advice(Expected(0xB), OURS)
    assert "expected node 000000000000000b of cluster 'blue'" in said
    assert "showed node 000000000000000a of cluster 'blue'" in said
    assert "check what runs at that address" in said


def test_who_joins_hears_of_tickets():
    assert "the key in the ticket, showed no certificate" in advice(Expected(UNKNOWN_NODE, b"pin", True), OURS)
    assert "expected a seed" in advice(Expected(UNKNOWN_NODE), None)
    assert "use the ticket" in advice(Expected(UNKNOWN_NODE), None)


def test_no_secret_is_told():
    assert "secret" not in advice(Expected(0xB, b"pin"), OURS)
