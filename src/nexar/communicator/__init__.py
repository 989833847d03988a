"""The communicator and its operations."""
