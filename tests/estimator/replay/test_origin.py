import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tekoa.estimator.replay import origin


def everything(path):
    return True


def test_loops_and_branches_are_followed():
    def scanned(x):
        def body(carry, row):
            return carry, jnp.log(row)

        return jax.lax.scan(body, 0.0, x)[1].sum()

    def looped(x):
        return jax.lax.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + 1, 1 / c[1]), (0, x))[1]

    def branched(x):
        return jax.lax.cond(x[0] > 0, lambda: jnp.sqrt(x), lambda: -jnp.ones(2))

    found = origin.find_origin(scanned, [jnp.array([1.0, 0.0])], everything)
    assert (found.operation, found.operands) == ("log", ("float32[]: from 0 to 0",))
    assert origin.find_origin(looped, [jnp.float32(0)], everything).operation == "div"
    assert origin.find_origin(branched, [jnp.array([1.0, -1.0])], everything).operation == "sqrt"
    assert origin.find_origin(branched, [jnp.array([-1.0, -1.0])], everything) is None


def test_infinity_is_followed_to_where_it_began():
    def function(x):
        grown = jnp.exp(x)
        return grown - grown

    assert origin.find_origin(function, [jnp.float32(1e4)], everything).operation == "exp"


def test_an_argument_that_is_not_finite_is_the_origin():
    found = origin.find_origin(
        lambda x, y: x * y, [jnp.ones(2), jnp.array([1, np.nan])], everything
    )
    assert (found.argument, found.operation) == (1, "")


def test_a_gradient_is_told_from_the_value():
    def function(x):
        return jax.grad(lambda x: jnp.where(x > 0, jnp.sqrt(x), 0.0))(x)

    found = origin.find_origin(function, [jnp.float32(0)], everything)
    assert found is not None
    assert found.file == __file__


def test_inside_a_function_of_jax_the_line_of_its_call_is_named():
    def function(x):
        return jnp.linalg.norm(x) + jnp.linalg.norm(0 * x)

    jnp.linalg.norm(jnp.ones(2))  # Traced here first.
    found = origin.find_origin(jax.grad(function), [jnp.ones(2)], everything)
    assert found is not None
    assert (found.file, found.line) == (__file__, function.__code__.co_firstlineno + 1)


def test_lines_of_python_itself_are_not_those_of_the_model():
    @contextlib.contextmanager
    def context():
        yield

    log = context()(jnp.log)  # Called by a function of `contextlib`.

    def function(x):
        return log(x)

    found = origin.find_origin(function, [jnp.zeros(2)], everything)
    assert found is not None
    assert (found.file, found.line) == (__file__, function.__code__.co_firstlineno + 1)


def test_without_a_line_of_the_user_that_of_the_package_is_named():
    loss = optax.softmax_cross_entropy_with_integer_labels
    found = origin.find_origin(loss, [jnp.ones((1, 2)), jnp.array([9])], everything)
    assert found is not None
    assert found.operation == "gather"
    assert "optax" in found.file
