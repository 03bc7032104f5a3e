"""Record a run, and report it to people."""
