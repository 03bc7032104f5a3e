"""The edge to the operating system."""
