"""Extensions: callables that receive a checkpoint and return it."""
