"""YAML to one typed profile."""
