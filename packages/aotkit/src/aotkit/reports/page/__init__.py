"""The HTML report on a function: how it was compiled, what its kernels cost, where its memory goes."""
