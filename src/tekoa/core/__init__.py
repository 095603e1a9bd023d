"""The engine: jax, optax and numpy only; imports nothing of tekoa."""
