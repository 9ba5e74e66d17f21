"""From a loop nest to LLVM IR text."""
