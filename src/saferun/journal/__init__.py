"""Write, read and clean what a run leaves on disk."""
