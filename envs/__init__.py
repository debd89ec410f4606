"""Task environments and their sandboxes, one package a task family. Nothing here imports jax."""
