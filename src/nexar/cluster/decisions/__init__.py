"""Pure machines: (state, event, now) in, actions out. No sockets, no clock, no chance."""
