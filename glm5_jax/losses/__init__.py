"""Losses, one file each, found by name."""
