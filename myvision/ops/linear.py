"""A linear layer: the functional API, and what torch must know of the operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from myvision._checks import FLOATING as _DTYPES  # noqa: F401  for `python -m myvision ops`
from myvision._checks import (
    check,
    check_activation,
    check_floating,
    check_like,
    check_output_mask,
    check_shape,
    check_tensors,
)
from myvision._dispatch.arguments import arguments_of, call_by_name, needs_of
from myvision._dispatch.autocast import register_autocast
from myvision._dispatch.autograd import past_autograd, register_autograd, register_second_derivative
from myvision._dispatch.fake import register_fake
from myvision._dispatch.nested import is_nested, on_nested_rows
from myvision._dispatch.overrides import overridable
from myvision._dispatch.vjp import gradients_of
from myvision._dispatch.vmap import Rule, batch_first, register_vmap
from myvision._formulas.linear import linear as formula
from myvision.ops._dropout import check_dropout, check_probability, new_seed

_linear = torch.ops.myvision.linear.default
_forward = torch.ops.myvision._linear_forward.default
_backward = torch.ops.myvision._linear_backward.default
_first_backward = past_autograd(_backward)

_OP = "linear"


@overridable
def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    negative_slope: float = 0.01,
    dropout_p: float = 0.0,
    residual: Tensor | None = None,
) -> Tensor:
    r"""A linear map of the last dimension with what often follows it, while its result is still in the cache.

    ``residual + dropout(activation(input @ weight.T + bias))``. Unlike the norms, which activate after the residual, it
    adds the residual last: so a transformer's block ends. A superset of :func:`torch.nn.functional.linear`.

    Sums of half types are taken in float32. Any strides are read as they are, unless the leading dimensions
    cannot be walked as one: then that tensor is copied. Under autocast all tensors take autocast's dtype.

    Args:
        input: ``[..., features]``, of float64, float32, float16 or bfloat16, with 1 dimension or more; or a nested
            tensor, jagged or strided, whose components have this last dimension.
        weight: ``[outputs, features]``, of the same dtype (under autocast they may differ).
        bias: ``[outputs]``, of the same dtype. Default: none.
        activation: None, ``"relu"``, ``"leaky_relu"``, ``"silu"``, ``"gelu"``, ``"gelu_tanh"`` or ``"hardswish"``.
        negative_slope: of ``"leaky_relu"``. Default: 0.01.
        dropout_p: with what probability an element is dropped, **also in evaluation**; the others are scaled by
            ``1 / (1 - dropout_p)``. Which ones follows from a number of torch's default generator, so that
            :func:`torch.manual_seed` repeats it, on any number of threads; no mask is kept for backward. Default: 0.
        residual: of the output's shape and the input's dtype, added at the end. Default: none.

    Returns:
        ``[..., outputs]``, of the input's dtype, contiguous. Without features it is what follows of the bias alone.

    Raises:
        TypeError: an argument is no tensor where it must be one.
        RuntimeError: shapes, dtypes or devices do not fit together, a dtype is not supported, the activation is
            unknown, or ``dropout_p`` is not between 0 and 1.

    Example::

        >>> import torch
        >>> from myvision.ops import linear
        >>> tokens = torch.randn(8, 128, 768)
        >>> widening, narrowing = torch.randn(3072, 768), torch.randn(768, 3072)
        >>> hidden = linear(tokens, widening, torch.zeros(3072), activation="gelu")
        >>> linear(hidden, narrowing, dropout_p=0.1, residual=tokens).shape
        torch.Size([8, 128, 768])

    Papers: `Gaussian Error Linear Units <https://arxiv.org/abs/1606.08415>`_, `Dropout
    <https://jmlr.org/papers/v15/srivastava14a.html>`_ and, for its random numbers, `Parallel Random Numbers: As Easy as
    1, 2, 3 <https://doi.org/10.1145/2063384.2063405>`_.
    """
    if is_nested(input):

        def of_rows(input: Tensor, residual: Tensor | None) -> Tensor:
            options: dict[str, Any] = {"activation": activation, "negative_slope": negative_slope}
            return linear(input, weight, bias, **options, dropout_p=dropout_p, residual=residual)

        return on_nested_rows(_OP, of_rows, input, residual, 1, "features")
    check_tensors(_OP, {"input": input, "weight": weight}, bias=bias, residual=residual)
    check_probability(_OP, dropout_p)
    seed = new_seed(input, dropout_p)
    return _linear(input, weight, bias, activation, negative_slope, dropout_p, seed, residual)


# ---- what the operators return, and what they reject: the same as csrc/ops/linear/linear.cpp -------------------------


def _output_shape(call: Any) -> tuple[int, ...]:
    return (*call.input.shape[:-1], call.weight.shape[0])


def _check_like_output(name: str, tensor: Tensor | None, call: Any) -> None:
    if tensor is not None:
        check_shape(_OP, name, tensor, _output_shape(call))
        check_like(_OP, name, tensor, call.input)


def _check_call(call: Any) -> None:
    input, weight = call.input, call.weight
    check_floating(_OP, "input", input)
    check(
        _OP,
        weight.dim() == 2,
        lambda: f"weight must have shape (outputs, features), but has shape {tuple(weight.shape)}",
    )
    check(
        _OP,
        input.dim() >= 1 and input.shape[-1] == weight.shape[1],
        lambda: (
            f"input must have {weight.shape[1]} features in its last dimension, as weight has, but has shape "
            f"{tuple(input.shape)}"
        ),
    )
    check_like(_OP, "weight", weight, input)
    if call.bias is not None:
        check_shape(_OP, "bias", call.bias, weight.shape[:1])
        check_like(_OP, "bias", call.bias, input)
    _check_like_output("residual", getattr(call, "residual", None), call)
    check_activation(_OP, call.activation)
    check_dropout(_OP, call.dropout_p, call.seed, input)


def _fake(call: Any) -> tuple[Tensor, Tensor]:
    _check_call(call)
    shape = _output_shape(call)
    return call.input.new_empty(shape), call.input.new_empty(0 if call.activation is None else shape)


def _fake_backward(call: Any) -> tuple[Tensor | None, ...]:
    _check_call(call)
    check_output_mask(_OP, call.output_mask, 3)
    _check_like_output("grad_output", call.grad_output, call)
    check_shape(_OP, "preactivation", call.preactivation, (0,) if call.activation is None else _output_shape(call))
    check(_OP, call.preactivation.is_contiguous(), lambda: "preactivation must be contiguous")
    check_like(_OP, "preactivation", call.preactivation, call.input)
    shapes = call.input.shape, call.weight.shape, call.weight.shape[:1]
    return tuple(
        call.input.new_empty(shape) if wanted else None for shape, wanted in zip(shapes, call.output_mask, strict=True)
    )


# ---- derivatives: the first by the fused kernels, the others through the formula -------------------------------------

_Arguments = arguments_of(_linear)


def _setup_context(ctx: Any, call: Any, results: tuple[Tensor, Tensor]) -> None:
    ctx.options = call.activation, call.negative_slope, call.dropout_p
    input, weight = call.input, call.weight
    if call.activation is None:  # then the gradient of each asks for the other alone, as torch's does
        needs = needs_of(_Arguments, ctx)
        input = input if needs.weight else _shape_of(input)
        weight = weight if needs.input else _shape_of(weight)
    ctx.save_for_backward(input, weight, call.bias, results[1], call.seed)


def _shape_of(tensor: Tensor) -> Tensor:
    """Stands in for a tensor of which only the shape matters: neither its memory is kept nor a change of it noticed."""
    return tensor.new_zeros(()).expand(tensor.shape)


def _differentiate(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    *saved, seed = ctx.saved_tensors
    needs = needs_of(_Arguments, ctx)
    wanted = [needs.input, needs.weight, needs.bias]
    input, weight, bias = (
        _first_backward(grad_output, *saved, *ctx.options, seed, wanted) if any(wanted) else (None, None, None)
    )
    return _Arguments(input=input, weight=weight, bias=bias, residual=grad_output if needs.residual else None)


def _gradients(call: Any) -> tuple[Tensor | None, ...]:
    """What the backward operator returns; the preactivation is computed anew, as it depends on the other inputs."""

    def forward(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return call_by_name(formula, call, input=input, weight=weight, bias=bias, residual=None)

    return gradients_of(forward, (call.input, call.weight, call.bias), call.output_mask, call.grad_output)


# ---- vmap: where all share the parameters the batch is one more dimension of rows; else one call an element ----------


def _whole(op: torch._ops.OpOverload) -> Rule:
    def call_once(batch_size: int, dims: Any, call: Any) -> Any:
        of_parameters = dims.weight is not None or dims.bias is not None or any(getattr(call, "output_mask", ())[1:])
        if of_parameters or call.dropout_p > 0:  # which counts the elements of each sample by themselves
            return None
        rows = {
            name: batch_first(getattr(call, name), getattr(dims, name), batch_size)
            for name in ("grad_output", "input", "preactivation", "residual")
            if name in call._fields
        }
        if "preactivation" in rows:
            kept = rows["preactivation"]
            rows["preactivation"] = kept.flatten() if call.activation is None else kept.contiguous()
        results = op(*call._replace(**rows))
        if isinstance(results, Tensor):
            return results, 0
        return results, tuple(0 if result is not None and result.dim() > 1 else None for result in results)

    return call_once


register_fake(_fake, _linear, _forward)
register_fake(_fake_backward, _backward)
register_autograd(_linear, _setup_context, _differentiate, composite=formula, forward=_forward)
register_second_derivative(_backward, _gradients)
register_autocast(_linear)
register_autocast(_backward, lambda call, _: call)  # its products, where they are torch's, are not cast behind its back
for _op in (_linear, _forward, _backward):
    register_vmap(_op, _whole(_op))
