"""Is this machine fit? Collectors fill the values of `vitals`; checks turn them into findings."""
