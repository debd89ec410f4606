"""Running a trained model: sampling, generation with the latent cache, self-speculation."""
