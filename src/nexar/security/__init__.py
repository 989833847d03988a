"""Who may come in: authority, credentials, names, TLS material."""
