"""Questions about the loop IR, asked by several passes."""
