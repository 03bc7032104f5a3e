"""Find the first cause of a failure in a log, and decide what follows."""
