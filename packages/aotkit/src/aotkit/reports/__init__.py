"""What became of a compile: explained, bisected, and the machine looked at."""
