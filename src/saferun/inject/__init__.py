"""Code that runs inside the ranks: standard library only, Python 3.9, no other room."""
