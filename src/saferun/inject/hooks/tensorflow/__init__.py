"""The hook `tensorflow`."""
