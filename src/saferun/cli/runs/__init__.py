"""`saferun runs`: list, show, watch, report."""
