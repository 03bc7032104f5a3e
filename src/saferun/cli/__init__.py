"""The commands: one file each parses, calls and prints; no decisions."""
