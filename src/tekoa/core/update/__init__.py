"""From gradients to parameters: clipping, noise, averages."""
