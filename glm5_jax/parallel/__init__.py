"""Meshes, and what the model may ask of the one it runs on."""
