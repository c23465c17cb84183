"""The registration of derivatives, on an operator of its own with second derivatives and saved tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import random_tensor, run_fresh_python
from torch import Tensor, func
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from myvision._dispatch import autocast, autograd


def product(x: Tensor, y: Tensor, power: int) -> Tensor:
    """The operator in plain torch: x ** power * y."""
    return x**power * y


def define(library: torch.library.Library, name: str, with_jvp: bool) -> Callable[[Tensor, Tensor, int], Tensor]:
    library.define(f"{name}(Tensor x, Tensor y, int power) -> Tensor")
    library.impl(name, product, "CompositeExplicitAutograd")
    op = getattr(torch.ops.myvision_test, name).default

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, y, ctx.power = inputs
        ctx.save_for_backward(x, y)
        ctx.save_for_forward(x, y)

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, y = ctx.saved_tensors
        needs_x, needs_y, _ = ctx.needs_input_grad
        grad_x = ctx.power * x ** (ctx.power - 1) * y * grad if needs_x else None
        return grad_x, op(x, grad, ctx.power) if needs_y else None, None

    def jvp(ctx: Any, x_tangent: Tensor, y_tangent: Tensor, _: None) -> Tensor:
        x, y = ctx.saved_tensors
        return ctx.power * x ** (ctx.power - 1) * y * x_tangent + op(x, y_tangent, ctx.power)

    def vmap(info: Any, in_dims: tuple[int | None, ...], x: Tensor, y: Tensor, power: int) -> tuple[Tensor, int]:
        x, y = (
            tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            for tensor, dim in zip((x, y), in_dims, strict=False)
        )
        return op(x, y, power), 0

    torch.library.register_vmap(op, vmap, lib=library)
    autograd.register_autograd(op, setup_context, backward, jvp if with_jvp else None)
    return op


_library = torch.library.Library("myvision_test", "DEF")
custom = define(_library, "product", with_jvp=True)
custom_without_jvp = define(_library, "product_without_jvp", with_jvp=False)

X, Y = random_tensor(3, 4, dtype=torch.float64, seed=1), random_tensor(3, 4, dtype=torch.float64, seed=2)
Operator = Callable[[Tensor, Tensor, int], Tensor]


def loss(op: Operator) -> Callable[[Tensor, Tensor], Tensor]:
    """Non-linear before and after the operator, so that each derivative depends on every level."""
    return lambda x, y: op(x.sin(), y.exp(), 3).square().sum()


def partly_no_grad(op: Operator) -> Callable[[Tensor, Tensor], Tensor]:
    def function(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            constant = op(x, y, 2)
        return (constant * op(x, y, 3)).sum()

    return function


REVERSE: dict[str, Callable[[Operator], Any]] = {
    "grad": lambda op: func.grad(loss(op), (0, 1))(X, Y),
    "vjp": lambda op: func.vjp(loss(op), X, Y)[1](torch.ones((), dtype=torch.float64)),
    "jacrev": lambda op: func.jacrev(lambda x, y: op(x, y, 2), (0, 1))(X, Y),
    "grad of grad": lambda op: func.grad(lambda x: func.grad(loss(op))(x, Y).sin().sum())(X),
    "three grads": lambda op: func.grad(
        lambda x: func.grad(lambda z: func.grad(loss(op))(z, Y).sin().sum())(x).cos().sum()
    )(X),
    "jacrev of jacrev": lambda op: func.jacrev(func.jacrev(loss(op)))(X, Y),
    "vmap of grad": lambda op: func.vmap(func.grad(loss(op), (0, 1)), (1, 1))(X, Y),
    "vmap of grad, one shared": lambda op: func.vmap(func.grad(loss(op), (0, 1)), (0, None))(X, Y[0]),
    "grad of vmap": lambda op: func.grad(lambda x, y: func.vmap(loss(op))(x, y).sin().sum(), (0, 1))(X, Y),
    "vmap of vmap": lambda op: func.vmap(func.vmap(loss(op)))(X, Y),
    "no_grad inside": lambda op: func.grad(partly_no_grad(op), (0, 1))(X, Y),
    "no_grad inside, twice": lambda op: func.grad(lambda x: func.grad(partly_no_grad(op))(x, Y).sin().sum())(X),
    "torch.func inside autograd": lambda op: through_both(op),
}
FORWARD: dict[str, Callable[[Operator], Any]] = {
    "jvp": lambda op: func.jvp(loss(op), (X, Y), (Y, X)),
    "jvp of one input": lambda op: func.jvp(lambda x: loss(op)(x, Y), (X,), (Y,)),
    "jacfwd": lambda op: func.jacfwd(lambda x, y: op(x, y, 2), (0, 1))(X, Y),
    "hessian": lambda op: func.hessian(loss(op), (0, 1))(X, Y),
    "jvp of grad": lambda op: func.jvp(func.grad(loss(op), (0, 1)), (X, Y), (Y, X)),
    "grad of jvp": lambda op: func.grad(lambda x: func.jvp(loss(op), (x, Y), (Y, x))[1])(X),
    "jacrev of jacfwd": lambda op: func.jacrev(func.jacfwd(loss(op)))(X, Y),
    "jacfwd of jacfwd": lambda op: func.jacfwd(func.jacfwd(loss(op)))(X, Y),
    "three jacfwd": lambda op: func.jacfwd(func.jacfwd(func.jacfwd(loss(op))))(X[0], Y[0]),
    "vmap of jvp": lambda op: func.vmap(lambda x, y: func.jvp(loss(op), (x, y), (y, x)))(X, Y),
    "jvp with no_grad inside": lambda op: func.jvp(partly_no_grad(op), (X, Y), (Y, X)),
    "grad of jvp with no_grad inside": lambda op: func.grad(lambda x: func.jvp(partly_no_grad(op), (x, Y), (Y, x))[1])(
        X
    ),
    "linearize": lambda op: func.linearize(loss(op), X, Y)[1](Y, X),
}


def through_both(op: Operator) -> Any:
    x = X.clone().requires_grad_()
    inner = func.grad(lambda y: loss(op)(x * y, y))(Y)
    return torch.autograd.grad(inner.sin().sum(), x)


def assert_same(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(pytree.tree_leaves(actual), pytree.tree_leaves(expected))


@pytest.mark.filterwarnings("ignore:`torch.jit", "ignore:Attempted to insert a get_attr Node")
@pytest.mark.parametrize("transform", [*REVERSE, *FORWARD])
def test_torch_func(transform: str):
    compute = {**REVERSE, **FORWARD}[transform]
    assert_same(compute(custom), compute(product))


@pytest.mark.parametrize("transform", REVERSE)
def test_torch_func_without_a_jvp_formula(transform: str):
    assert_same(REVERSE[transform](custom_without_jvp), REVERSE[transform](product))


@pytest.mark.parametrize("transform", ["jvp", "jacfwd", "hessian", "jvp of grad", "grad of jvp", "jacfwd of jacfwd"])
def test_forward_mode_without_a_jvp_formula_raises(transform: str):
    with pytest.raises((RuntimeError, NotImplementedError), match="jvp"):
        FORWARD[transform](custom_without_jvp)


def test_gradcheck():
    inputs = (X.clone().requires_grad_(), Y.clone().requires_grad_(), 3)
    assert torch.autograd.gradcheck(custom, inputs, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(custom, inputs, check_fwd_over_rev=True)


def test_forward_ad():
    with forward_ad.dual_level():
        duals = forward_ad.make_dual(X, Y), forward_ad.make_dual(Y, X)
        assert_same(forward_ad.unpack_dual(custom(*duals, 3)), forward_ad.unpack_dual(product(*duals, 3)))
        with pytest.raises((RuntimeError, NotImplementedError), match="jvp"):
            custom_without_jvp(*duals, 3)
        assert forward_ad.unpack_dual(custom_without_jvp(X, Y, 3)).tangent is None


def test_create_graph():
    gradients = []
    for op in (custom, product):
        x = X.clone().requires_grad_()
        (first,) = torch.autograd.grad(loss(op)(x, Y), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sin().sum(), x, create_graph=True)
        gradients.append((first, second, *torch.autograd.grad(second.cos().sum(), x)))
    assert_same(*gradients)


def test_saved_tensor_hooks_see_what_is_saved():
    packed: list[Tensor] = []
    x = X.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        output = custom(x, Y, 3)
    assert len(packed) == 2
    output.sum().backward()
    torch.testing.assert_close(x.grad, 3 * X**2 * Y)


def test_checkpoint():
    x = X.clone().requires_grad_()
    torch.utils.checkpoint.checkpoint(loss(custom), x, Y, use_reentrant=False).backward()
    torch.testing.assert_close(x.grad, func.grad(loss(product))(X, Y))


def test_graph_names_the_operator():
    x = X.clone().requires_grad_()
    assert type(custom(x, Y, 3).grad_fn).__name__ == "ProductBackward"
    assert custom(X, Y, 3).grad_fn is None
    with torch.no_grad():
        assert custom(x, Y, 3).grad_fn is None


def test_compiled_autograd():
    x = X.clone().requires_grad_()
    compiled = torch.compile(lambda x: loss(custom)(x, Y), backend="aot_eager", fullgraph=True)
    compiled(x).backward()
    torch.testing.assert_close(x.grad, func.grad(loss(product))(X, Y))


def test_defaults_are_refused():
    _library.define("with_default(Tensor x, int power=2) -> Tensor")
    with pytest.raises(ValueError, match="default value"):
        autograd.register_autograd(torch.ops.myvision_test.with_default.default, print, print)


def test_falls_back_to_public_calls_that_are_right_or_raise():
    run_fresh_python(
        """
import torch
import torch._functorch.utils
del torch._functorch.utils.enable_single_level_autograd_function  # a private name that a later torch may not have
from myvision._dispatch import autograd
assert not autograd._LEAN
import pytest, test_autograd, test_my_add
test_autograd.test_create_graph()
test_autograd.test_saved_tensor_hooks_see_what_is_saved()
x = torch.randn(3, dtype=torch.float64, requires_grad=True)
torch.autograd.gradcheck(test_my_add.my_add, (x, torch.ones_like(x)))
torch.autograd.gradgradcheck(test_my_add.my_add, (x, torch.ones_like(x)))
for compute in (*test_autograd.REVERSE.values(), *test_autograd.FORWARD.values()):
    try:
        result = compute(test_autograd.custom)
    except (RuntimeError, NotImplementedError):
        continue
    test_autograd.assert_same(result, compute(test_autograd.product))
with torch.autograd.forward_ad.dual_level():
    dual = torch.autograd.forward_ad.make_dual(torch.ones(2), torch.ones(2))
    with pytest.raises(NotImplementedError, match="forward-mode AD"):
        test_my_add.my_add(dual, torch.ones(2))
    assert torch.equal(test_my_add.my_add(torch.ones(2), torch.ones(2)), torch.full((2,), 3.0))
"""
    )


# ---- autocast --------------------------------------------------------------------------------------------------------


def test_autocast_casts_what_differs():
    seen: list[torch.dtype] = []
    _library.define("autocasted(Tensor x, Tensor y, Tensor? z, int[2] sizes) -> Tensor")

    def implementation(x: Tensor, y: Tensor, z: Tensor | None, sizes: list[int]) -> Tensor:
        seen[:] = [x.dtype, y.dtype, *([] if z is None else [z.dtype])]
        assert not torch.is_autocast_enabled("cpu")
        return x.clone()

    _library.impl("autocasted", implementation, "CPU")
    op = torch.ops.myvision_test.autocasted.default
    autocast.register_autocast(op)
    single, half, double, integer = (
        torch.ones(2, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int32)
    )
    with torch.autocast("cpu", torch.bfloat16):
        op(single, half, None, [1, 2])
        assert seen == [torch.bfloat16, torch.bfloat16]
        op(double, integer, single, [1, 2])
        assert seen == [torch.float64, torch.int32, torch.bfloat16]
        assert torch.is_autocast_enabled("cpu")
        with pytest.raises(RuntimeError):
            op(None, None, None, [1, 2])
        assert torch.is_autocast_enabled("cpu")
    op(single, half, None, [1, 2])
    assert seen == [torch.float32, torch.bfloat16]
