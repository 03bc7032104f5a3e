"""What a run leaves on disk: written, read, cleaned."""
