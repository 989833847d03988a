"""Which of a peer's addresses to dial, and in which order. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from nexar.cluster.addresses import Number
from nexar.transport.address import Candidate, Network, host_of, order_candidates

_ONE_HOST: Final = "shm"
"""The scheme that leads nowhere beyond this host."""


def dial_order(
    addresses: Mapping[str, Sequence[str]],
    *,
    schemes: Sequence[str],
    same_host: bool,
    networks: Sequence[Network] = (),
    own: Collection[Number] = (),
) -> dict[str, tuple[str, ...]]:
    """Scheme → its addresses worth dialing, the most promising first; schemes in the order of `schemes`, without those
    that have none. See transport.address.order_candidates for the order of addresses.

    `networks` and `own` are the networks and the addresses of this host. On another host an address of ours is another
    node's, or leads back to us: it is left out, like loopback. But a peer that has no other address than ours shares
    our network whatever its host is called, and is dialed like a peer on this host, if not through memory.
    """
    usable = [scheme for scheme in schemes if same_host or scheme != _ONE_HOST]
    offered = [Candidate(scheme, address) for scheme in usable for address in addresses.get(scheme, ())]
    numbers = {str(number) for number in own}
    foreign = [candidate for candidate in offered if host_of(candidate.address) not in numbers]
    shares_network = same_host or not foreign
    if not shares_network:
        offered = foreign
    order: dict[str, list[str]] = {}
    for candidate in order_candidates(offered, schemes=usable, networks=networks, same_host=shares_network):
        order.setdefault(candidate.scheme, []).append(candidate.address)
    return {scheme: tuple(chosen) for scheme, chosen in order.items()}
