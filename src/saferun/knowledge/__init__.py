"""What is known about the world: data with sources, and the code that loads them."""
