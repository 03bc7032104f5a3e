"""What only logs from elsewhere need: the front of `saferun diagnose`."""
