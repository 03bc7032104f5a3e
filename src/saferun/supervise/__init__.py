"""The loop around the attempts of one run."""
