"""A run on several machines."""
