"""Keep things ready for the next attempt: keepers, agents, our own files."""
