"""Is this machine fit?

Collectors fill in the values of `vitals`; checks turn them into findings.
"""
