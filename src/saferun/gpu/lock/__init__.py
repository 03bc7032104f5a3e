"""Locks on GPUs, and slots on them."""
