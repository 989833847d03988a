"""What moves where."""
