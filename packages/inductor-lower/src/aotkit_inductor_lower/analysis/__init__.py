"""Questions about graphs and loop IR, asked by several passes."""
