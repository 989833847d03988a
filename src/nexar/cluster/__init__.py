"""Who is here: the seed opens the door, workers knock, a membership says who everybody is."""
