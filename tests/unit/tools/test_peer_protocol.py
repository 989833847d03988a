"""What a parent and its peer process say, and how they name functions to each other.

The terms on which two processes meet.
"""

import msgspec
import pytest

from nexar.security.authority import Authority
from nexar.security.certificates import Trust
from nexar_tools.peer_process import PeerProcess
from nexar_tools.peer_protocol import (
    LINKED,
    RAW,
    ConnectionTerms,
    ConnectTo,
    PeerOrder,
    PeerReady,
    PeerReport,
    PeerResult,
    PeerStart,
    PeerStop,
    reference,
)


def a_start() -> PeerStart:
    authority = Authority.create("test")
    return PeerStart(
        credentials=authority.admit(7),
        trust=Trust(authority.certificate_pem),
        peer=8,
        schemes=["tls"],
        host="::1",
        settings={"eager_limit_bytes": 1},
        node_class="a:B",
        function="c:d",
        arguments=[1, "two", None, {"three": [3.5]}],
        path=["somewhere"],
        timeout=2.5,
    )


ORDERS = [a_start(), ConnectTo(), ConnectTo({"tls": "[::1]:5"}), PeerStop()]


@pytest.mark.parametrize("order", ORDERS, ids=["start", "connect", "connect to an address", "stop"])
def test_an_order_arrives_as_it_was_given(order):
    line = msgspec.json.encode(order)
    assert b"\n" not in line
    assert msgspec.json.decode(line, type=PeerOrder) == order


@pytest.mark.parametrize(
    "report", [PeerReady({"quic": "1.2.3.4:5"}), PeerResult([1, 2]), PeerResult(failure="Traceback\n…")]
)
def test_a_report_arrives_as_it_was_given(report):
    line = msgspec.json.encode(report)
    assert b"\n" not in line
    assert msgspec.json.decode(line, type=PeerReport) == report


def test_the_private_key_does_not_show():
    assert "PRIVATE" not in repr(a_start())


def test_a_function_is_named_by_its_module():
    assert reference(reference) == "nexar_tools.peer_protocol:reference"
    assert reference("any.module:name") == "any.module:name"


def test_a_function_inside_another_cannot_be_named():
    def inside() -> None:
        raise AssertionError

    with pytest.raises(ValueError, match="inside"):
        reference(inside)


def test_nodes_have_links_by_default():
    assert ConnectionTerms().node_class_name == LINKED
    assert ConnectionTerms(raw=True).node_class_name == RAW
    assert ConnectionTerms(raw=True, node_class="mine:Node").node_class_name == "mine:Node"


def test_an_unknown_term_is_refused_at_once():
    with pytest.raises(TypeError, match="colour"):
        PeerProcess("a:b", colour="red")
