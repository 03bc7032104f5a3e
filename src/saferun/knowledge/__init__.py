"""What is known about the world: data with sources, and how they are loaded."""
