"""Speed beside peers measured in the same run. `python -m experiments.benchmarks.table` prints it all."""
