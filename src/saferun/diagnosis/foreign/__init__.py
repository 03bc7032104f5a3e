"""Diagnose logs from elsewhere, for `saferun diagnose`."""
