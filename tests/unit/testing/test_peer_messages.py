"""What a parent and its peer process say, and how they name functions to each other."""

import msgspec
import pytest

from nexar.security.authority import Authority
from nexar.security.credentials import Trust
from nexar.testing.peer_messages import Dial, Leave, Order, Outcome, Ready, Report, Start, reference


def a_start() -> Start:
    authority = Authority.create("test")
    return Start(
        credentials=authority.admit(7),
        trust=Trust(authority.certificate_pem),
        peer=8,
        schemes=["tls"],
        host="::1",
        settings={"eager_limit_bytes": 1},
        assembly="a:B",
        function="c:d",
        arguments=[1, "two", None, {"three": [3.5]}],
        path=["somewhere"],
        timeout=2.5,
    )


@pytest.mark.parametrize("order", [a_start(), Dial(), Dial({"tls": "[::1]:5"}), Leave()], ids=repr)
def test_an_order_arrives_as_it_was_given(order):
    line = msgspec.json.encode(order)
    assert b"\n" not in line
    assert msgspec.json.decode(line, type=Order) == order


@pytest.mark.parametrize("report", [Ready({"quic": "1.2.3.4:5"}), Outcome([1, 2]), Outcome(failure="Traceback\n…")])
def test_a_report_arrives_as_it_was_given(report):
    line = msgspec.json.encode(report)
    assert b"\n" not in line
    assert msgspec.json.decode(line, type=Report) == report


def test_the_private_key_does_not_show():
    assert "PRIVATE" not in repr(a_start())


def test_a_function_is_named_by_its_module():
    assert reference(reference) == "nexar.testing.peer_messages:reference"
    assert reference("any.module:name") == "any.module:name"


def test_a_function_inside_another_cannot_be_named():
    def inside() -> None:
        raise AssertionError

    with pytest.raises(ValueError, match="inside"):
        reference(inside)
