"""Kernels, a folder each: api.py (public, picks the implementation), reference.py (plain jnp), tpu.py."""
