"""Rules of the interpreter: how each JAX primitive uses its inputs.

A rule is a function `rule(reader, eqn, inputs) -> outputs` listed in its file's `RULES`.

- `moves`: the result is still the parameter (transpose, reshape, slice, cast, join).
- `pointwise`: biases, gains, embeddings, tokens, arguments of exp and the like.
- `contractions`: dense layers, convolutions, einsums; attention, which has no parameters.
- `control_flow`: calls, scan, while, cond and shard_map, whose bodies are interpreted.
- `samples`: how primitives without a parameter act on `Samples`.
"""
