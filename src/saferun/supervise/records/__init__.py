"""What a run writes down and tells people."""
