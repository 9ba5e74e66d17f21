"""`python -m tools.replay`: does a change of structure leave every program and every kernel as it was?

A refactoring must not change what is generated. The corpus is the forward and backward graphs of the five
architectures and of torch's table of operators; each graph is compiled for the host's processor and for Triton, and the
scheduled loop IR, the kernels' text and the messages of refusals are kept. `against COMMIT` does that with the sources
of a commit and with the present ones, and prints what differs.
"""
