"""Links to peers: messages, flow control, matching, and the progress engine."""
