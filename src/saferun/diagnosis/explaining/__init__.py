"""Explain a diagnosis in words."""
