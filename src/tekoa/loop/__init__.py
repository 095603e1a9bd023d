"""TrainLoop and EvalLoop, driven by the user's own code."""
