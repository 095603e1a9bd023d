"""Finds the Amos scale (eta) and slot shape of every parameter from the model's computation.

1. `auto.scales_of_function` traces `fn(params, *batch)` to a jaxpr (`trace`).
2. `find.find_rows` runs the jaxpr once in the interpreter, or twice if embeddings are tied.
3. `interpreter.Reader` evaluates one equation after the other on `values.Value`s: real
   arrays, or `Samples` if only shapes are known. A value that is still a parameter, merely
   transposed, sliced or joined, carries a `views.View` of where the parameter's axes are.
4. An equation that involves a parameter is handled by a rule of `rules`: `moves` keep the
   view; `pointwise` and `contractions` record how the parameter is used, and continue with
   a result of the rms it would have in a trained network; `control_flow` enters loops.
5. `uses` collects the uses of each parameter and turns them into a `ScaleDecision`; `roles`
   holds what the parameter's axes do in them.
6. `table.ScaleTable` prints the rows and provides `eta_fn` and `shape_fn` for `amos`.
"""

from tekoa.optim.scales.auto import amos_for as amos_for
from tekoa.optim.scales.auto import scales as scales
from tekoa.optim.scales.auto import scales_of_function as scales_of_function
from tekoa.optim.scales.table import ScaleTable as ScaleTable
