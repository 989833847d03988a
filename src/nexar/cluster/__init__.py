"""Membership: the seed, joining, links between members, failure detection and recovery."""
