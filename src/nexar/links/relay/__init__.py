"""Links to peers without a connection: other nodes forward their frames, end to end in order and without loss.

carrier     the relayed carrier: numbering, acknowledgement, retransmission, payloads
forwarding  queues per neighbour, held frames, choice of another route
relay       the node's relay: arrival, forwarding, sending, and draining before closing
"""
