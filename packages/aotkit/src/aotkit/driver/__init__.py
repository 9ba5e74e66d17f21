"""One compile from its start to its callable: the stages in order, and the one function that binds."""
