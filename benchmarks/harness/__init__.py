"""What runs benchmarks: the command line, results, the machine, timing, processes, memory, GPUs."""
