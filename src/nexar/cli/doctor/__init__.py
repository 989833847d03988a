"""`nexar doctor`: what is the matter with this machine, or between these machines, and what to change."""
