"""The hook `init`."""
