import jax
import jax.numpy as jnp

from tekoa.loop.flops import count_flops


def test_products_are_counted_inside_loops_and_calls():
    w, x = jnp.ones((5, 4, 4)), jnp.ones((2, 4))

    def stack(w, x):
        return jax.lax.scan(lambda x, w: (jax.jit(jnp.dot)(x, w), None), x, w)[0]

    assert count_flops(stack, w, x) == 5 * 2 * (2 * 4 * 4)
    # Backwards: one product for the gradient of each factor.
    assert count_flops(jax.grad(lambda w: stack(w, x).sum()), w) == 3 * 5 * 2 * (2 * 4 * 4)


def test_convolutions_are_counted():
    image, kernel = jnp.ones((1, 8, 8, 3)), jnp.ones((3, 3, 3, 16))

    def convolve(image, kernel):
        return jax.lax.conv_general_dilated(
            image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    assert count_flops(convolve, image, kernel) == 2 * (8 * 8 * 16) * (3 * 3 * 3)


def test_recomputation_is_counted_only_if_it_is_there():
    x = jnp.ones((4, 4))

    def loss(w):
        return jnp.sin(x @ w).sum()

    plain, recomputed = (count_flops(jax.grad(f), x) for f in (loss, jax.checkpoint(loss)))
    assert recomputed == plain + 2 * 4**3
