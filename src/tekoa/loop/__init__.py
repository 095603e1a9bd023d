"""TrainLoop and EvalLoop: iterators that the user drives."""
