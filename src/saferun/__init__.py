"""saferun: the command that stands where torchrun stands, and the run survives."""

__version__ = "0.1.0"
