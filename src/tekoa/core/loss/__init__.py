"""What a loss function is: how it reduces the rows of a batch."""
