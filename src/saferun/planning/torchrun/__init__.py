"""torchrun's grammar and installation."""
