"""Remote procedure calls between the ranks of a communicator."""
