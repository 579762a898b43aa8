"""A decoder with multi-token attention: training, generation, and the throughput of a training step."""
