"""Links to peers that are no neighbours: their frames travel over other nodes, end to end in order and without loss.

carrier    looks like any other carrier to its link        station   the node's: what arrives, goes on, or goes out
stream     numbers, acknowledgements, what is sent again   ways      the neighbours: what waits at which
landing    where arriving payloads go                      hop       one of them: room by hops travelled
rerouting  which way is taken, and what if there is none   settling  what is still owed before a node closes
words      what a node itself says to the others           held      what it cannot take yet
"""
