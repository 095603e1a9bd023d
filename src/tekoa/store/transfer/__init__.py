"""Moving checkpoints between runs: warm start, migration, copies."""
