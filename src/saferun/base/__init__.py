"""What every process of saferun needs of the operating system, and words that all of them use."""
