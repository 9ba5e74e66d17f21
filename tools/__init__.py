"""Checks, benchmark and other helpers of the repository; nothing here is shipped."""
