"""Where the buffers of a program live, and the plan that says so."""
