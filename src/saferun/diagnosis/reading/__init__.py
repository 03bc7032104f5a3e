"""Read logs and tracebacks as lines with their ranks and meaning."""
