"""Find settings that do nothing: variables that nobody reads, or that another one overrides."""
