"""MultiheadAttention: torch's, in every way of calling it."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from typing import Any

import pytest
import torch
from helpers import operators_run, random_tensor
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from myvision.nn import KeyValueCache, MultiheadAttention

BATCH, QUERIES, KEYS, WIDTH, HEADS = 3, 5, 7, 12, 4

pytestmark = pytest.mark.filterwarnings("ignore:Support for mismatched:UserWarning")


def pair(**options: Any) -> tuple[MultiheadAttention, nn.MultiheadAttention]:
    """Ours and torch's with the same parameters, all of which show in the result."""
    theirs = nn.MultiheadAttention(WIDTH, HEADS, **options).double()
    with torch.no_grad():
        for i, parameter in enumerate(theirs.parameters()):
            parameter.copy_(random_tensor(*parameter.shape, dtype=torch.float64, seed=i) / 2)
    ours = MultiheadAttention(WIDTH, HEADS, **options).double()
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def tokens(length: int, width: int = WIDTH, *, batch_first: bool = True, batched: bool = True, seed: int = 0) -> Tensor:
    shape = (length, width) if not batched else (BATCH, length, width) if batch_first else (length, BATCH, width)
    return random_tensor(*shape, dtype=torch.float64, seed=seed)


def causal(queries: int, keys: int) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool).triu(1)


def additive(hidden: Tensor) -> Tensor:
    """A floating mask that hides the same keys, and weighs the others."""
    noise = random_tensor(*hidden.shape, dtype=torch.float64, seed=9)
    return noise.masked_fill(hidden, -math.inf)


def masks(queries: int, keys: int, batched: bool = True) -> dict[str, Tensor | None]:
    batch = BATCH if batched else 1
    hidden = random_tensor(batch * HEADS, queries, keys) > 0.5
    hidden[..., 0] = False  # each query sees a key: torch gives NaN elsewhere
    return {
        "none": None,
        "bool": hidden[0],
        "bool of each head": hidden,
        "float": additive(hidden[0]),
        "float of each head": additive(hidden),
    }


def paddings(keys: int, batched: bool = True) -> dict[str, Tensor | None]:
    hidden = torch.arange(keys) >= torch.tensor([keys, keys - 2, 2])[:, None]
    hidden = hidden if batched else hidden[1]
    return {"none": None, "bool": hidden, "float": additive(hidden)}


def check_same(ours: nn.Module, theirs: nn.Module, *inputs: Tensor, **options: Any) -> None:
    """In training, in evaluation, without gradients; and the gradients."""
    for training, needs_grad in itertools.product((True, False), repeat=2):
        ours.train(training), theirs.train(training)
        with torch.set_grad_enabled(needs_grad):
            torch.testing.assert_close(ours(*inputs, **options), theirs(*inputs, **options))
    distinct = list({id(tensor): tensor for tensor in inputs}.values())
    gradients = []
    for module in (ours, theirs):
        leaves = {id(tensor): tensor.clone().requires_grad_() for tensor in distinct}
        output, weights = module(*(leaves[id(tensor)] for tensor in inputs), **options)
        total = output.pow(2).sum() + (0 if weights is None else weights.pow(3).sum())
        gradients.append(torch.autograd.grad(total, [*leaves.values(), *module.parameters()]))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("padding", paddings(1))
@pytest.mark.parametrize("mask", masks(1, 1))
@pytest.mark.parametrize("need_weights", [False, True])
def test_masks(mask: str, padding: str, need_weights: bool) -> None:
    ours, theirs = pair(batch_first=True)
    options = {"key_padding_mask": paddings(KEYS)[padding], "need_weights": need_weights}
    query, memory = tokens(QUERIES), tokens(KEYS, seed=1)
    check_same(ours, theirs, query, memory, memory, attn_mask=masks(QUERIES, KEYS)[mask], **options)
    check_same(ours, theirs, memory, memory, memory, attn_mask=masks(KEYS, KEYS)[mask], **options)


@pytest.mark.parametrize("inputs", ["self", "memory", "three"])
@pytest.mark.parametrize(("batch_first", "batched"), [(True, True), (False, True), (True, False), (False, False)])
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"add_bias_kv": True}, {"add_zero_attn": True}], ids=str)
def test_layouts_and_inputs(inputs: str, batch_first: bool, batched: bool, options: dict[str, bool]) -> None:
    ours, theirs = pair(batch_first=batch_first, **options)
    query, key, value = (tokens(KEYS, batch_first=batch_first, batched=batched, seed=i) for i in range(3))
    arguments = {"self": (query, query, query), "memory": (query, key, key), "three": (query, key, value)}[inputs]
    for mask, padding in (("none", "none"), ("float of each head", "none"), ("bool", "bool")):
        given = {"attn_mask": masks(KEYS, KEYS, batched)[mask], "key_padding_mask": paddings(KEYS, batched)[padding]}
        check_same(ours, theirs, *arguments, need_weights=False, **given)


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("average", [True, False])
def test_weights(average: bool, batched: bool) -> None:
    ours, theirs = pair(add_bias_kv=True, add_zero_attn=True)
    x = tokens(KEYS, batch_first=False, batched=batched)
    given = {"attn_mask": masks(KEYS, KEYS, batched)["bool"], "key_padding_mask": paddings(KEYS, batched)["bool"]}
    check_same(ours, theirs, x, x, x, average_attn_weights=average, **given)


@pytest.mark.parametrize(
    "widths", [{"kdim": 5, "vdim": 6}, {"kdim": 5}, {"vdim": WIDTH, "kdim": 6, "bias": False}], ids=str
)
def test_other_widths(widths: dict[str, Any]) -> None:
    ours, theirs = pair(batch_first=True, **widths)
    key = tokens(KEYS, widths.get("kdim", WIDTH), seed=1)
    value = tokens(KEYS, widths.get("vdim", WIDTH), seed=2)
    check_same(ours, theirs, tokens(QUERIES), key, value)


@pytest.mark.parametrize("padding", paddings(1))
@pytest.mark.parametrize("need_weights", [False, True])
def test_causal_hint(padding: str, need_weights: bool) -> None:
    """With and without a hint the result is the same; the hint is what torch takes it for where it reads no mask."""
    ours, theirs = pair(batch_first=True)
    options = {"key_padding_mask": paddings(KEYS)[padding], "need_weights": need_weights}
    for mask in (causal(KEYS, KEYS), torch.zeros(KEYS, KEYS).double().masked_fill(causal(KEYS, KEYS), -math.inf)):
        x = tokens(KEYS)
        check_same(ours, theirs, x, x, x, attn_mask=mask, is_causal=True, **options)
        query = tokens(QUERIES)
        check_same(ours, theirs, query, x, x, attn_mask=mask[:QUERIES], is_causal=True, **options)
    assert not torch.equal(ours(x, x, x, attn_mask=mask, is_causal=True)[0], ours(x, x, x)[0])


@pytest.mark.parametrize("options", [{"add_bias_kv": True}, {"add_zero_attn": True}], ids=str)
def test_causal_hint_hides_no_extra_key(options: dict[str, bool]) -> None:
    ours, theirs = pair(batch_first=True, **options)
    x, mask = tokens(KEYS), causal(KEYS, KEYS)
    expected = theirs(x, x, x, attn_mask=mask, need_weights=False)
    torch.testing.assert_close(ours(x, x, x, attn_mask=mask, need_weights=False, is_causal=True), expected)


def test_padding_beside_the_hint_is_not_merged() -> None:
    ours, _ = pair(batch_first=True)
    x, mask, padding = tokens(KEYS), causal(KEYS, KEYS), paddings(KEYS)["bool"]
    given = []
    with pytest.MonkeyPatch.context() as patch:
        import myvision.nn.attention as module

        original = module.scaled_dot_product_attention

        def spy(*args: Any, **kwargs: Any) -> Tensor:
            given.append(args)
            return original(*args, **kwargs)

        patch.setattr(module, "scaled_dot_product_attention", spy)
        ours(x, x, x, attn_mask=mask, key_padding_mask=padding, is_causal=True, need_weights=False)
        ours(x, x, x, attn_mask=mask, key_padding_mask=padding, need_weights=False)
        ours(x, x, x, attn_mask=masks(KEYS, KEYS)["bool of each head"], need_weights=False)
    assert [call[3].shape for call in given] == [
        (BATCH, 1, 1, KEYS),
        (BATCH, 1, KEYS, KEYS),
        (BATCH, HEADS, KEYS, KEYS),
    ]
    assert {call[3].dtype for call in given} == {torch.bool}
    assert [call[5] for call in given] == [True, False, False]
    query, key, value = given[0][:3]
    assert query.untyped_storage().data_ptr() == value.untyped_storage().data_ptr() == key.untyped_storage().data_ptr()


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("floating", [False, True])
def test_a_query_that_sees_no_key_gets_zero(floating: bool, need_weights: bool) -> None:
    ours, theirs = pair(batch_first=True)
    x, padding = tokens(KEYS).requires_grad_(), torch.zeros(BATCH, KEYS, dtype=torch.bool)
    padding[1] = True
    mask = torch.zeros(BATCH, KEYS).double().masked_fill(padding, -math.inf) if floating else padding
    output, weights = ours(x, x, x, key_padding_mask=mask, need_weights=need_weights)
    torch.testing.assert_close(output[1], ours.out_proj.bias.expand(KEYS, WIDTH))
    torch.testing.assert_close(output[::2], theirs(x, x, x, key_padding_mask=mask)[0][::2])
    if weights is not None:
        assert torch.count_nonzero(weights[1]) == 0
    output.sum().backward()
    assert torch.count_nonzero(x.grad[1]) == 0
    assert all(parameter.grad.isfinite().all() for parameter in ours.parameters())


def test_float_mask_has_a_gradient() -> None:
    ours, theirs = pair(batch_first=True)
    x = tokens(KEYS)
    gradients = []
    for module in (ours, theirs):
        mask = random_tensor(KEYS, KEYS, dtype=torch.float64, seed=3).requires_grad_()
        with sdpa_kernel(SDPBackend.MATH):
            module(x, x, x, attn_mask=mask, key_padding_mask=paddings(KEYS)["float"], need_weights=False)[0].pow(
                2
            ).sum().backward()
        gradients.append(mask.grad)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("need_weights", [False, True])
def test_dropout_is_of_the_weights(need_weights: bool) -> None:
    module = MultiheadAttention(64, 1, dropout=0.5, batch_first=True)
    with torch.no_grad():
        module.in_proj_weight.zero_()
        module.in_proj_bias.fill_(1)  # all scores are equal and all values 1: the output counts what is kept
        module.out_proj.weight.copy_(torch.eye(64))
    x = torch.rand(4, 256, 64)
    assert torch.equal(module.eval()(x, x, x, need_weights=need_weights)[0].round(decimals=4), torch.ones_like(x))
    first = module.train()(x, x, x, need_weights=need_weights)[0]
    assert 0.95 < first.mean() < 1.05
    assert 0.04 < first[..., 0].std() < 0.09  # of a binomial of 256: 1/16
    torch.manual_seed(5)
    again = module(x, x, x, need_weights=need_weights)[0]
    torch.manual_seed(5)
    assert torch.equal(module(x, x, x, need_weights=need_weights)[0], again)
    assert not torch.equal(first, again)


X = torch.zeros(BATCH, KEYS, WIDTH)
BAD = {
    "2-d mask": (
        {"attn_mask": torch.zeros(KEYS, KEYS - 1)},
        r"attn_mask must have shape \(7, 7\) or \(12, 7, 7\), but has",
    ),
    "2-d mask, causal": ({"attn_mask": torch.zeros(KEYS, KEYS - 1), "is_causal": True}, r"attn_mask must have shape"),
    "3-d mask": ({"attn_mask": torch.zeros(BATCH, KEYS, KEYS)}, r"attn_mask must have shape .* has shape \(3, 7, 7\)"),
    "1-d mask": ({"attn_mask": torch.zeros(KEYS)}, r"attn_mask must have shape"),
    "integer mask": (
        {"attn_mask": torch.zeros(KEYS, KEYS, dtype=torch.int64)},
        "attn_mask must be bool, .* dtype int64",
    ),
    "padding": (
        {"key_padding_mask": torch.zeros(BATCH, KEYS + 1)},
        r"key_padding_mask must have shape \(3, 7\), but has",
    ),
    "transposed padding": ({"key_padding_mask": torch.zeros(KEYS, BATCH)}, "key_padding_mask must have shape"),
    "integer padding": ({"key_padding_mask": torch.zeros(BATCH, KEYS, dtype=torch.uint8)}, "must be bool, .* uint8"),
    "hint alone": ({"is_causal": True}, "is_causal is a hint .* attn_mask is None"),
}


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("name", BAD)
def test_bad_masks_raise(name: str, need_weights: bool) -> None:
    options, message = BAD[name]
    module = MultiheadAttention(WIDTH, HEADS, batch_first=True)
    for training, needs_grad in itertools.product((True, False), repeat=2):
        with torch.set_grad_enabled(needs_grad), pytest.raises(RuntimeError, match=message):
            module.train(training)(X, X, X, need_weights=need_weights, **options)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((X[..., 1:], X, X), r"query must have shape \[batch, length, 12\], or \[length, 12\]"),
        ((X, X[0], X), r"key must have shape .* has shape \(7, 12\)"),
        ((X[None], X[None], X[None]), r"query must have shape"),
        ((X, X, X[:, 1:]), "key and value also the same length, but have shapes"),
        ((X, X[1:], X[1:]), "must have the same batch size"),
    ],
)
def test_bad_inputs_raise(inputs: tuple[Tensor, ...], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        MultiheadAttention(WIDTH, HEADS, batch_first=True)(*inputs, need_weights=False)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_raise() -> None:
    nested = torch.nested.nested_tensor([X[0], X[1, :3]])
    with pytest.raises(RuntimeError, match="query is a nested tensor; pass a padded one, with key_padding_mask"):
        MultiheadAttention(WIDTH, HEADS, batch_first=True)(nested, nested, nested)


def test_empty_inputs() -> None:
    ours, _ = pair(batch_first=True)
    no_batch, no_keys = torch.zeros(0, KEYS, WIDTH).double(), torch.zeros(BATCH, 0, WIDTH).double()
    for need_weights in (False, True):
        assert ours(no_batch, no_batch, no_batch, need_weights=need_weights)[0].shape == no_batch.shape
        output, _ = ours(tokens(QUERIES), no_keys, no_keys, need_weights=need_weights)
        torch.testing.assert_close(output, ours.out_proj.bias.expand(BATCH, QUERIES, WIDTH))


def test_copies_and_state() -> None:
    module, theirs = pair(batch_first=True, kdim=5, add_bias_kv=True)
    theirs.load_state_dict(module.state_dict(), strict=True)
    assert repr(module) == repr(theirs)
    assert isinstance(module, nn.MultiheadAttention)
    query, key = tokens(QUERIES), tokens(KEYS, 5)
    expected = module(query, key, tokens(KEYS))[0]
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(copied(query, key, tokens(KEYS))[0], expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_types_and_autocast(dtype: torch.dtype) -> None:
    ours, theirs = pair(batch_first=True)
    x, mask, padding = tokens(KEYS), masks(KEYS, KEYS)["bool"], paddings(KEYS)["bool"]
    oracle = theirs(x, x, x, attn_mask=mask, key_padding_mask=padding)
    half = x.to(dtype)
    for need_weights, floating in itertools.product((True, False), repeat=2):
        given = torch.zeros(KEYS, KEYS).masked_fill(mask, -math.inf) if floating else mask
        options = {"attn_mask": given, "key_padding_mask": padding, "need_weights": need_weights}
        output, weights = copy.deepcopy(ours).to(dtype)(half, half, half, **options)
        assert output.dtype == dtype
        torch.testing.assert_close(output.double(), oracle[0], rtol=0, atol=0.1)
        with torch.autocast("cpu", dtype):
            output, weights = copy.deepcopy(ours).float()(x.float(), x.float(), x.float(), **options)
        assert output.dtype == dtype
        torch.testing.assert_close(output.double(), oracle[0], rtol=0, atol=0.1)
        assert weights is None or weights.shape == oracle[1].shape


def test_graphs() -> None:
    ours, _ = pair(batch_first=True)
    options = {"attn_mask": causal(KEYS, KEYS), "key_padding_mask": paddings(KEYS)["bool"], "need_weights": False}
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager", dynamic=True)
    for is_causal in (False, True):
        x = tokens(KEYS)
        expected = ours(x, x, x, **options, is_causal=is_causal)[0]
        torch.testing.assert_close(compiled(x, x, x, **options, is_causal=is_causal)[0], expected)
    exported = torch.export.export(ours, (x, x, x), options)
    torch.testing.assert_close(exported.module()(x, x, x, **options)[0], expected)
    targets = [str(node.target) for node in exported.graph.nodes]
    assert sum("myvision.attention" in target for target in targets) == 1
    assert sum("myvision.linear" in target for target in targets) == 2
    assert not any("aten.linear" in target for target in targets)


def test_meta() -> None:
    module = MultiheadAttention(WIDTH, HEADS, device="meta")
    x = torch.empty(KEYS, BATCH, WIDTH, device="meta")
    output, weights = module(x, x, x, key_padding_mask=torch.empty(BATCH, KEYS, dtype=torch.bool, device="meta"))
    assert (output.shape, weights.shape) == (x.shape, (BATCH, KEYS, KEYS))
    assert module(x, x, x, need_weights=False)[0].shape == x.shape


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True, "add_zero_attn": True}], ids=str)
def test_cache_of_self_attention(batch_first: bool, need_weights: bool, options: dict[str, bool]) -> None:
    ours, _ = pair(batch_first=batch_first, **options)
    x, cache, outputs = tokens(KEYS, batch_first=batch_first), KeyValueCache(), []
    length = 1 if batch_first else 0
    for step in x.split([2, 1, 3, 1], dim=length):
        outputs.append(ours(step, step, step, need_weights=need_weights, cache=cache)[0])
    expected = ours(x, x, x, attn_mask=causal(KEYS, KEYS), need_weights=need_weights)[0]
    torch.testing.assert_close(torch.cat(outputs, dim=length), expected)
    assert cache.key.shape == (BATCH, HEADS, KEYS, WIDTH // HEADS)


@pytest.mark.parametrize("widths", [{}, {"kdim": 5, "vdim": 5}], ids=str)
def test_cache_of_a_memory(widths: dict[str, int]) -> None:
    ours, _ = pair(batch_first=True, **widths)
    query, memory, cache = tokens(QUERIES), tokens(KEYS, widths.get("kdim", WIDTH), seed=1), KeyValueCache()
    options = {"key_padding_mask": paddings(KEYS)["bool"], "need_weights": False}
    expected = ours(query, memory, memory, **options)[0]
    first = ours(query[:, :2], memory, memory, cache=cache, **options)[0]
    ignored = torch.full_like(memory, math.nan)
    rest = ours(query[:, 2:], ignored, ignored, cache=cache, **options)[0]
    torch.testing.assert_close(torch.cat([first, rest], dim=1), expected)


@pytest.mark.parametrize("kind", ["self", "memory"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_cache_of_another_batch_size_is_told(batch_first: bool, kind: str) -> None:
    ours, _ = pair(batch_first=batch_first)
    cache, batch = KeyValueCache(), 0 if batch_first else 1
    x = tokens(KEYS, batch_first=batch_first)
    fewer = x.narrow(batch, 0, 1)
    ours(x if kind == "self" else x.clone(), x, x, cache=cache)
    with pytest.raises(RuntimeError, match=f"cache holds keys of batch size {BATCH}, but query has 1"):
        ours(fewer if kind == "self" else fewer.clone(), fewer, fewer, cache=cache)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("masks", [{"attn_mask": (0, KEYS, KEYS)}, {"key_padding_mask": (0, KEYS)}], ids=str)
def test_masks_without_a_batch(masks: dict[str, tuple[int, ...]], need_weights: bool) -> None:
    ours, _ = pair(batch_first=True)
    x = torch.zeros(0, KEYS, WIDTH).double()
    given = {name: torch.zeros(shape, dtype=torch.bool) for name, shape in masks.items()}
    assert ours(x, x, x, need_weights=need_weights, **given)[0].shape == x.shape


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("masks", [{"attn_mask": (KEYS, KEYS)}, {"key_padding_mask": (BATCH, KEYS)}], ids=str)
def test_masks_of_another_dtype_raise(masks: dict[str, tuple[int, ...]], need_weights: bool) -> None:
    module = MultiheadAttention(WIDTH, HEADS, batch_first=True)
    given = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in masks.items()}
    with pytest.raises(RuntimeError, match="must have dtype bool, float32 or that of query, float32, but have float64"):
        module(X, X, X, need_weights=need_weights, **given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *[({name: None}, f"{name} must be a tensor, but got NoneType") for name in ("query", "key", "value")],
        ({"key_padding_mask": [1]}, "key_padding_mask must be a tensor, but got list"),
        ({"attn_mask": "c"}, "attn_mask must be a tensor, but got str"),
        ({"cache": "no"}, "cache must be a KeyValueCache, but got str"),
    ],
    ids=str,
)
def test_arguments_of_a_wrong_type_raise(options: dict[str, Any], message: str) -> None:
    module = MultiheadAttention(WIDTH, HEADS, batch_first=True)
    with pytest.raises(TypeError, match=message):
        module(**{"query": X, "key": X, "value": X, **options})


# ---- projections are one operator each -------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": WIDTH, "vdim": WIDTH + 1}], ids=str)
def test_operators(options: dict[str, Any]) -> None:
    ours, _ = pair(batch_first=True, **options)
    query, key, value = tokens(QUERIES), tokens(KEYS), tokens(KEYS, options.get("vdim", WIDTH), seed=2)
    cases = [((query, key, value), 3)]
    if "vdim" not in options:
        cases += [((query, key, key), 2), ((query, query, query), 1)]
    for training in (True, False):
        for inputs, count in cases:
            run = operators_run(ours.train(training), *inputs, need_weights=False)
            assert run == [*["myvision.linear"] * count, "myvision.attention", "myvision.linear"]
    cache = KeyValueCache()
    operators_run(ours, query, key, value, need_weights=False, cache=cache)
    run = operators_run(ours, query, key, value, need_weights=False, cache=cache)
    assert run == ["myvision.linear", "myvision.attention", "myvision.linear"]


def test_an_output_projection_of_another_kind_is_called() -> None:
    x = tokens(KEYS)

    def outputs(change: Any) -> Tensor:
        module, _ = pair(batch_first=True)
        change(module)
        return module(x, x, x, need_weights=False)[0]

    class Halved(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) / 2

    def by_hook(module: nn.Module) -> None:
        module.out_proj.register_forward_hook(lambda _module, _args, output: output / 2)

    def by_subclass(module: nn.Module) -> None:
        module.out_proj.__class__ = Halved

    def by_forward(module: nn.Module) -> None:
        forward = module.out_proj.forward
        module.out_proj.forward = lambda input: forward(input) / 2

    def by_another(module: nn.Module) -> None:
        halved = Halved(WIDTH, WIDTH).double()
        halved.load_state_dict(module.out_proj.state_dict())
        module.out_proj = nn.Sequential(halved)

    def by_parametrization(module: nn.Module) -> None:
        class Half(nn.Module):
            def forward(self, tensor: Tensor) -> Tensor:
                return tensor / 2

        for name in ("weight", "bias"):
            nn.utils.parametrize.register_parametrization(module.out_proj, name, Half())

    expected = outputs(lambda module: None) / 2
    for change in (by_hook, by_subclass, by_forward, by_another, by_parametrization):
        torch.testing.assert_close(outputs(change), expected)


def test_input_projections_whose_weight_is_parametrized() -> None:
    ours, theirs = pair(batch_first=True)
    for module in (ours, theirs):
        nn.utils.parametrizations.weight_norm(module, "in_proj_weight")
    x = tokens(KEYS)
    torch.testing.assert_close(ours(x, x, x), theirs(x, x, x))
