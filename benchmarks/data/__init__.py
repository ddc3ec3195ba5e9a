"""What benchmarks are run on: weights, files of them, and models that are made, not downloaded."""
