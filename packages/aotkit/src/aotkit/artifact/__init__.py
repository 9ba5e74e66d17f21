"""A compiled function as data: its records, its key, its guards, where it is kept."""
