"""The terms on which two processes meet."""

import pytest

from nexar.testing.peer_process import PeerProcess
from nexar.testing.peer_terms import LINKED, RAW, Terms


def test_nodes_have_links_unless_told_otherwise():
    assert Terms().node_class == LINKED
    assert Terms(raw=True).node_class == RAW
    assert Terms(raw=True, assembly="mine:Node").node_class == "mine:Node"


def test_an_unknown_term_is_refused_at_once():
    with pytest.raises(TypeError, match="colour"):
        PeerProcess("a:b", colour="red")
