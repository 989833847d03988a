"""Pure state machines: (state, event, now) in, actions out; no sockets, no clock, no randomness."""
