"""Which ranks have a link for data, and how the others are reached: arithmetic on graphs. Pure."""
