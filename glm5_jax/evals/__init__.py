"""Measures of a model: one file a task, and the baselines that they stand beside."""
