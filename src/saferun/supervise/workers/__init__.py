"""Several workers of one run."""
