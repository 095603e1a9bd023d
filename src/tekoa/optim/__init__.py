"""Optimizers: Amos, the classic triples, schedules, groups, bridges to optax."""
