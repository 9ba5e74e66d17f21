"""What models become on a CUDA device, looked at without one: graphs, kernels, memory traffic, expected times."""
