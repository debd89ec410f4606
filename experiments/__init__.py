"""One file an experiment; its get_config() returns a glm5_jax.config.RunConfig."""
