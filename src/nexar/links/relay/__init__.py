"""Links to peers without a connection: other nodes forward their frames, end to end in order and without loss."""
