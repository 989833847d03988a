"""Arrays as bytes with a dtype and a shape."""
