"""From a loop nest to Triton source."""
