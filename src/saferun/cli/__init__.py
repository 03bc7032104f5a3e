"""The commands: one file for each, which parses, calls and prints; it decides nothing."""
