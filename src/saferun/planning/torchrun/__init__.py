"""The grammar of torchrun's command line, and its installation."""
