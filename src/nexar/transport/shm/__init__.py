"""Transport between processes of one host: rings in a sealed memory segment, and a Unix socket for wakeups."""
