"""What a node shows before the seed has certified it.

A node listens before it joins, because it must tell the seed where; and nobody listens without a certificate. This one
is signed by an authority that is forgotten as soon as it has signed, so nobody can ever believe it. A node replaces it
by the real one, on the same endpoint, when the seed has answered.
"""

from __future__ import annotations

from typing import Final

from nexar.security.authority import Authority
from nexar.security.credentials import Credentials
from nexar.types import NodeId

_NO_CLUSTER: Final = "provisional"


def provisional_credentials(node: NodeId) -> Credentials:
    """Credentials that are in good form and believed by nobody. The key is for nothing else: for the certificate it
    asks for, a node makes another."""
    return Authority.create(_NO_CLUSTER).admit(node)
