"""Files to packed rows of token ids. Never imports jax."""
