"""The hook `guards`."""
