"""Decide which failure is the first cause, and what follows from it."""
