"""Links to peers: messages, flow control, matching, and the progress engine that drives them."""
