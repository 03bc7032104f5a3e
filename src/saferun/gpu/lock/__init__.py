"""Locks on GPUs, and slots of them."""
