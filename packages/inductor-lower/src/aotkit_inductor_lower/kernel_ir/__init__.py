"""Loop nests as the targets see them: each buffer is an offset in the memory that owns it."""
