"""A log to its first cause, and what follows from it."""
