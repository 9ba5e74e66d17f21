"""Operators with arguments drawn from their schemas, compiled and compared with eager: `python -m tools.fuzz_ops`."""
