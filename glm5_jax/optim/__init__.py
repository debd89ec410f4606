"""Optimisers and schedules: Muon Split for matrices, AdamW for the rest, GLM-5's stages."""
