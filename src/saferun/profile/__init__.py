"""Read YAML into one typed profile."""
