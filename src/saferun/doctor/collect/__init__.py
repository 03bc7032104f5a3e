"""Collect facts from the machine."""
