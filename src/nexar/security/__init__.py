"""Certificates, tickets, proofs of the secret, private files and TLS contexts."""
