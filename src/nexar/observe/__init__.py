"""What you look at: how ranks that hang or failed came apart."""
