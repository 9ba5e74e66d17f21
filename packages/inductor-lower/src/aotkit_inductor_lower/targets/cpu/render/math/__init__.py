"""Elementary functions as LLVM IR, within two units in the last place."""
