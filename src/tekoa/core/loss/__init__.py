"""What a loss function is: how it reduces the rows of a batch, and its scale in float16."""
