"""Training in one call: `fit`, its result, and models loaded for inference."""
