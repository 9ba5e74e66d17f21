"""Facts about operators, one table each."""
