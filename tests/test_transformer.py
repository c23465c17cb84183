"""The Transformer's modules: torch's, layer by layer and as a whole."""

from __future__ import annotations

import copy
import itertools
import pickle
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from helpers import operators_run, random_tensor, run_python
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import myvision.nn as ours

BATCH, SOURCE, TARGET, WIDTH, HEADS = 3, 7, 5, 8, 2
NAMES = [
    "TransformerEncoderLayer",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerDecoder",
    "Transformer",
]

PARTS = ["TransformerEncoder", "TransformerDecoder"]  # of a Transformer, whose graph has all that is in theirs
OF_A_PART = pytest.mark.exhaustive

pytestmark = [
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
]


def make(modules: Any, name: str, **options: Any) -> Any:
    """Of torch.nn or of myvision.nn, small, without dropout."""
    options = {"dim_feedforward": 16, "dropout": 0.0, "batch_first": True, **options}
    if name == "Transformer":
        return modules.Transformer(WIDTH, HEADS, 2, 2, **options)
    if name.endswith("Layer"):
        return getattr(modules, name)(WIDTH, HEADS, **options)
    layer = getattr(modules, name + "Layer")(WIDTH, HEADS, **options)
    return getattr(modules, name)(layer, 2, modules.LayerNorm(WIDTH))


def pair(name: str, **options: Any) -> tuple[Any, Any]:
    """Ours and torch's in float64, with the same parameters, all of which show in the result."""
    theirs = make(nn, name, **options).double()
    for layer in theirs.modules():  # torch's copies of a layer forget an activation that is a module, and take ReLU
        if "activation" in layer._modules:
            layer.__dict__.pop("activation", None)
    with torch.no_grad():
        for i, parameter in enumerate(theirs.parameters()):
            parameter.copy_(random_tensor(*parameter.shape, dtype=torch.float64, seed=i) / 3)
    module = make(ours, name, **options).double()
    module.load_state_dict(theirs.state_dict())
    return module, theirs


def inputs(name: str, batch_first: bool = True, batched: bool = True) -> tuple[Tensor, ...]:
    lengths = [SOURCE] if "Encoder" in name else [TARGET, SOURCE] if "Decoder" in name else [SOURCE, TARGET]
    tensors = [random_tensor(BATCH, length, WIDTH, dtype=torch.float64, seed=i) for i, length in enumerate(lengths)]
    if not batched:
        return tuple(tensor[0] for tensor in tensors)
    return tuple(tensors if batch_first else [tensor.transpose(0, 1).contiguous() for tensor in tensors])


def padding(length: int) -> Tensor:
    return torch.arange(length) >= torch.tensor([length - 1, length, 2])[:, None]


def causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).triu(1)


def with_floats(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(mask, -torch.inf)


def masks_of_encoder(name: str, convert: Callable[[Tensor], Tensor]) -> list[dict[str, Tensor]]:
    prefix = "" if name == "TransformerEncoder" else "src_"
    mask, hidden = {f"{prefix}mask": convert(causal(SOURCE))}, {"src_key_padding_mask": convert(padding(SOURCE))}
    if name == "Transformer":  # what torch's encoder makes of padding depends on its mode
        hidden["memory_key_padding_mask"] = hidden["src_key_padding_mask"]
    some = random_tensor(SOURCE, SOURCE) > 0
    some[:, 0] = False  # each token sees the first one: torch gives NaN elsewhere
    other = {f"{prefix}mask": convert(some)}
    return [mask, hidden, mask | hidden, other, other | hidden]


def masks_of_decoder(convert: Callable[[Tensor], Tensor]) -> list[dict[str, Tensor]]:
    mask, hidden = {"tgt_mask": convert(causal(TARGET))}, {"tgt_key_padding_mask": convert(padding(TARGET))}
    memory = {"memory_mask": convert(torch.ones(TARGET, SOURCE, dtype=torch.bool).triu(2))}
    memory_hidden = {"memory_key_padding_mask": convert(padding(SOURCE))}
    of_heads = {"tgt_mask": convert(causal(TARGET).expand(BATCH * HEADS, -1, -1).clone())}
    return [mask, hidden, memory, memory_hidden, mask | hidden, mask | hidden | memory | memory_hidden, of_heads]


def all_masks(name: str, convert: Callable[[Tensor], Tensor]) -> list[dict[str, Tensor]]:
    of_encoder = masks_of_encoder(name, convert) if "Decoder" not in name else []
    of_decoder = masks_of_decoder(convert) if "Encoder" not in name else []
    return [{}, *of_encoder, *of_decoder]


def check_same(module: nn.Module, theirs: nn.Module, *given: Tensor, **masks: Any) -> None:
    """In training, in evaluation (torch's fast path), without gradients; and the gradients."""
    visible = ~masks["src_key_padding_mask"] if "src_key_padding_mask" in masks and len(given) == 1 else None
    for training, needs_grad in itertools.product((True, False), repeat=2):
        module.train(training), theirs.train(training)
        with torch.set_grad_enabled(needs_grad):
            actual, expected = module(*given, **masks), theirs(*given, **masks)
        assert actual.shape == given[-1 if len(given) == 2 and isinstance(theirs, nn.Transformer) else 0].shape
        if visible is not None and expected.shape == actual.shape and not training and not needs_grad:
            actual, expected = actual[visible], expected[visible]  # torch's stack gives zeros for padding
        if expected.shape == actual.shape:  # torch's stack may cut padding off
            torch.testing.assert_close(actual, expected)
    gradients = []
    for network in (module, theirs):
        leaves = [tensor.clone().requires_grad_() for tensor in given]
        gradients.append(torch.autograd.grad(network(*leaves, **masks).pow(2).sum(), [*leaves, *network.parameters()]))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_masks(name: str, norm_first: bool) -> None:
    module, theirs = pair(name, norm_first=norm_first)
    for masks in all_masks(name, lambda mask: mask):
        check_same(module, theirs, *inputs(name), **masks)
    if name != "Transformer":
        for masks in all_masks(name, with_floats):
            theirs.train()  # the fast path takes no floating masks
            torch.testing.assert_close(module(*inputs(name), **masks), theirs(*inputs(name), **masks))


VARIANTS = [
    {},
    {"bias": False},
    {"activation": "gelu"},
    {"activation": torch.tanh},
    {"activation": nn.GELU()},
    {"layer_norm_eps": 0.5, "norm_first": True},
    {"norm_first": True, "bias": False, "activation": F.silu},
]


def described(options: dict[str, Any]) -> str:
    """Without addresses, which differ from process to process."""
    return " ".join(f"{name}={getattr(value, '__name__', value)}" for name, value in options.items()) or "default"


@pytest.mark.parametrize("options", VARIANTS, ids=described)
@pytest.mark.parametrize("name", NAMES)
def test_constructors(name: str, options: dict[str, Any]) -> None:
    module, theirs = pair(name, **options)
    check_same(module, theirs, *inputs(name))
    theirs.load_state_dict(module.state_dict(), strict=True)
    assert isinstance(module, type(theirs))
    assert repr(module) == repr(theirs)


@pytest.mark.parametrize(("batch_first", "batched"), [(False, True), (True, False), (False, False)])
@pytest.mark.parametrize("name", NAMES)
def test_layouts(name: str, batch_first: bool, batched: bool) -> None:
    for norm_first in (False, True):
        module, theirs = pair(name, batch_first=batch_first, norm_first=norm_first)
        given = inputs(name, batch_first, batched)
        check_same(module, theirs, *given)
        if "Encoder" not in name:
            check_same(module, theirs, *given, tgt_mask=causal(TARGET), tgt_is_causal=True)


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_gives_the_same_parameters(name: str) -> None:
    torch.manual_seed(1)
    module = make(ours, name)
    torch.manual_seed(1)
    torch.testing.assert_close(dict(module.state_dict()), dict(make(nn, name).state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["TransformerEncoder", "Transformer"])
def test_padding_is_not_cut_off(name: str) -> None:
    module = make(ours, name).eval()
    hidden = torch.zeros(BATCH, SOURCE, dtype=torch.bool)
    hidden[:, 4:] = True  # in all rows: torch's stack may return 4 tokens
    given = [tensor.float() for tensor in inputs(name)]
    with torch.no_grad():
        output = module(*given, src_key_padding_mask=hidden)
    assert output.shape == given[-1].shape
    torch.testing.assert_close(output, module.train()(*given, src_key_padding_mask=hidden))


@pytest.mark.parametrize("hint", [None, False, True])
def test_hints(hint: bool | None) -> None:
    for convert in (with_floats, lambda mask: mask):
        module, theirs = pair("Transformer")
        masks = {"src_mask": convert(causal(SOURCE)), "tgt_mask": convert(causal(TARGET))}
        check_same(module, theirs, *inputs("Transformer"), src_is_causal=hint, tgt_is_causal=hint, **masks)
    module, theirs = pair("TransformerDecoder")
    memory_mask = torch.ones(TARGET, SOURCE, dtype=torch.bool).triu(1)
    check_same(module, theirs, *inputs("TransformerDecoder"), memory_mask=memory_mask, memory_is_causal=True)


def test_causal_masks_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    module = make(ours, "TransformerEncoder").double()
    hints = []
    module.layers[0].forward = lambda x, src_mask, src_key_padding_mask, is_causal: hints.append(is_causal) or x
    x = inputs("TransformerEncoder")[0]
    learnt = with_floats(causal(SOURCE)).requires_grad_()
    for mask in (causal(SOURCE), with_floats(causal(SOURCE)), causal(SOURCE).roll(1, 0), learnt, None):
        module(x, mask)
    assert hints == [True, True, False, False, False]


@pytest.mark.parametrize("name", NAMES)
def test_wrong_masks_raise(name: str) -> None:
    module = make(ours, name)
    given = [tensor.float() for tensor in inputs(name)]
    wrong: list[dict[str, Any]] = []
    if "Decoder" not in name:
        key, hint = ("mask", "is_causal") if name == "TransformerEncoder" else ("src_mask", "src_is_causal")
        hint = hint if name == "Transformer" else "is_causal"
        wrong += [{key: causal(SOURCE + 1)}, {key: causal(SOURCE + 1), hint: True}, {hint: True}]
        wrong += [{"src_key_padding_mask": padding(SOURCE - 1)}]
    if "Encoder" not in name:
        wrong += [{"tgt_mask": causal(TARGET - 1)}, {"tgt_mask": causal(TARGET - 1), "tgt_is_causal": True}]
        wrong += [{"memory_mask": causal(TARGET)}, {"memory_mask": causal(TARGET), "memory_is_causal": True}]
        wrong += [{"tgt_is_causal": True}, {"memory_key_padding_mask": padding(SOURCE).T}]
    for masks, training in itertools.product(wrong, (True, False)):
        with torch.no_grad(), pytest.raises(RuntimeError, match=r"must have shape|is_causal is a hint"):
            module.train(training)(*given, **masks)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("name", ["TransformerEncoderLayer", "TransformerDecoderLayer"])
def test_dropout(name: str, norm_first: bool) -> None:
    """With all dropped after the blocks only the residual is left; probabilities are those of the submodules."""
    module = make(ours, name, norm_first=norm_first, dropout=1.0)
    given = [tensor.float() for tensor in inputs(name)]
    expected = given[0]
    if not norm_first:
        for _ in range(2 if "Encoder" in name else 3):
            expected = F.layer_norm(expected, (WIDTH,))
    torch.testing.assert_close(module(*given), expected)
    module.dropout1 = module.dropout2 = module.dropout3 = nn.Identity()
    module.dropout.p = module.self_attn.dropout = 0.0
    if "Decoder" in name:
        module.multihead_attn.dropout = 0.0
    without = make(ours, name, norm_first=norm_first)
    without.load_state_dict(module.state_dict())
    torch.testing.assert_close(module(*given), without(*given))
    without.dropout1.p = 0.5
    torch.manual_seed(3)
    first = without(*given)
    assert not torch.equal(first, module(*given))
    torch.manual_seed(3)
    assert torch.equal(without(*given), first)
    assert torch.equal(without.eval()(*given), without(*given))


@pytest.mark.parametrize(
    "hooked",
    [["self_attn", "linear2"], ["norm1", "norm2"], ["dropout1", "dropout2"], ["linear1", "dropout"]],
    ids=" ".join,
)
@pytest.mark.parametrize("norm_first", [False, True])
def test_hooks_and_replaced_modules(norm_first: bool, hooked: list[str]) -> None:
    module, theirs = pair("TransformerEncoderLayer", norm_first=norm_first)
    x = inputs("TransformerEncoderLayer")[0]
    seen: dict[Any, list[Tensor]] = {module: [], theirs: []}
    for layer in seen:
        for name in hooked:
            layer.get_submodule(name).register_forward_hook(
                lambda _, args, output, layer=layer: seen[layer].append(
                    output if isinstance(output, Tensor) else output[0]
                )
            )
        layer(x)
    assert len(seen[module]) == 2
    torch.testing.assert_close(seen[module], seen[theirs])
    for replaced in (nn.RMSNorm(WIDTH).double(), ours.LayerNormAct(WIDTH).double(), nn.Identity()):
        module, theirs = pair("TransformerEncoderLayer", norm_first=norm_first)
        plain = nn.Sequential(nn.LayerNorm(WIDTH).double(), nn.ReLU())
        module.norm1 = module.norm2 = replaced
        theirs.norm1 = theirs.norm2 = plain if isinstance(replaced, ours.LayerNormAct) else replaced
        torch.testing.assert_close(module(x), theirs(x))


def test_layers_of_one_package_in_the_stack_of_the_other() -> None:
    hidden = padding(SOURCE)
    x = inputs("TransformerEncoder")[0]
    module, theirs = pair("TransformerEncoderLayer")
    mixed = [nn.TransformerEncoder(module, 2), ours.TransformerEncoder(theirs, 2)]
    expected = ours.TransformerEncoder(module, 2)
    for stack in mixed:
        for training in (True, False):
            with torch.no_grad():
                output = stack.train(training)(x, src_key_padding_mask=hidden)
            torch.testing.assert_close(output, expected(x, src_key_padding_mask=hidden))
    module, theirs = pair("TransformerDecoderLayer")
    given = inputs("TransformerDecoder")
    expected = ours.TransformerDecoder(module, 2)(*given, tgt_mask=causal(TARGET))
    for stack in (nn.TransformerDecoder(module, 2), ours.TransformerDecoder(theirs, 2)):
        torch.testing.assert_close(stack(*given, tgt_mask=causal(TARGET)), expected)


def test_custom_encoder_and_decoder() -> None:
    encoder, decoder = make(ours, "TransformerEncoder"), make(nn, "TransformerDecoder")
    module = ours.Transformer(WIDTH, HEADS, custom_encoder=encoder, custom_decoder=decoder, batch_first=True)
    assert module.encoder is encoder
    assert module.decoder is decoder
    source, target = (tensor.float() for tensor in inputs("Transformer"))
    torch.testing.assert_close(module(source, target), decoder(target, encoder(source)))


def test_an_encoder_of_ours_does_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(ours, "TransformerEncoder", norm_first=True)
        make(ours, "Transformer")


@pytest.mark.parametrize("name", NAMES)
def test_copies(name: str) -> None:
    module = make(ours, name, activation=F.gelu).eval()
    given = [tensor.float() for tensor in inputs(name)]
    expected = module(*given)
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(copied(*given), expected)
    if name in ("TransformerEncoder", "TransformerDecoder"):
        assert len({id(layer) for layer in module.layers}) == 2
        assert len({parameter.data_ptr() for parameter in module.parameters()}) == len(list(module.parameters()))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("name", [pytest.param(name, marks=OF_A_PART if name in PARTS else ()) for name in NAMES])
def test_graphs(name: str, norm_first: bool, training: bool) -> None:
    module = make(ours, name, norm_first=norm_first).train(training)
    given = tuple(tensor.float() for tensor in inputs(name))
    masks = all_masks(name, lambda mask: mask)[-2]
    expected = module(*given, **masks)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*given, **masks), expected)
    exported = torch.export.export(module, given, masks)
    torch.testing.assert_close(exported.module()(*given, **masks), expected)
    targets = [str(node.target) for node in exported.graph.nodes]
    count = {"TransformerEncoderLayer": 1, "TransformerDecoder": 4, "Transformer": 6}.get(name, 2)
    assert sum("myvision.attention" in target for target in targets) == count
    assert sum("add_layer_norm" in target for target in targets) >= count
    products = {"Layer": 1, "coder": 2}.get(name[-5:], 0) * (4 if "Encoder" in name else 7) or 2 * (4 + 7)
    assert sum("myvision.linear" in target for target in targets) == products
    assert not any(f"aten.{op}." in target for target in targets for op in ("linear", "relu", "dropout"))


def test_one_graph_for_all_lengths() -> None:
    module = make(ours, "TransformerEncoderLayer").eval()
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(module, fullgraph=True, backend=backend, dynamic=True)
    for length in (4, 9, 17):
        x, mask = random_tensor(BATCH, length, WIDTH), causal(length)
        torch.testing.assert_close(compiled(x, mask, is_causal=True), module(x, mask, is_causal=True))
    assert len(graphs) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_types_and_autocast(dtype: torch.dtype) -> None:
    module, theirs = pair("Transformer", norm_first=True)
    given = inputs("Transformer")
    masks = {"tgt_mask": causal(TARGET), "src_key_padding_mask": padding(SOURCE)}
    oracle = theirs(*given, **masks)
    output = copy.deepcopy(module).to(dtype)(*(tensor.to(dtype) for tensor in given), **masks)
    assert output.dtype == dtype
    torch.testing.assert_close(output.double(), oracle, rtol=0.05, atol=0.05)
    network = copy.deepcopy(module).float()
    with torch.autocast("cpu", dtype):
        output = network(*(tensor.float() for tensor in given), **masks)
    torch.testing.assert_close(output.double(), oracle, rtol=0.05, atol=0.05)
    output.float().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in network.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_meta(name: str) -> None:
    module = make(ours, name, device="meta") if name != "TransformerEncoder" else make(ours, name).to("meta")
    if name == "TransformerDecoder":
        module = module.to("meta")
    given = [torch.empty_like(tensor, dtype=torch.float32, device="meta") for tensor in inputs(name)]
    assert module(*given).shape == (given[1] if name == "Transformer" else given[0]).shape
    assert {parameter.device.type for parameter in module.parameters()} == {"meta"}
    double = make(ours, name, dtype=torch.float64) if name in ("Transformer", "TransformerEncoderLayer") else module
    assert double is module or {parameter.dtype for parameter in double.parameters()} == {torch.float64}


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_cache(batch_first: bool, norm_first: bool) -> None:
    module, _ = pair("TransformerDecoder", batch_first=batch_first, norm_first=norm_first)
    module.eval()
    tokens, memory = inputs("TransformerDecoder", batch_first)
    hidden = {"memory_key_padding_mask": padding(SOURCE)}
    expected = module(tokens, memory, tgt_mask=causal(TARGET), **hidden)
    cache, length = module.new_cache(), 1 if batch_first else 0
    steps = [module(step, memory, cache=cache, **hidden) for step in tokens.split([2, 1, 2], dim=length)]
    torch.testing.assert_close(torch.cat(steps, dim=length), expected)


@pytest.mark.parametrize("name", ["TransformerEncoderLayer", "TransformerEncoder"])
def test_an_encoder_without_input_raises(name: str) -> None:
    with pytest.raises(TypeError, match="src must be a tensor, but got NoneType"):
        make(ours, name, norm_first=True)(None)


@pytest.mark.parametrize("name", ["TransformerDecoderLayer", "TransformerDecoder"])
@pytest.mark.parametrize("position", [0, 1])
def test_a_decoder_without_input_raises(name: str, position: int) -> None:
    given: list[Any] = [torch.zeros(BATCH, TARGET, WIDTH)] * 2
    given[position] = None
    with pytest.raises(TypeError, match=f"{['tgt', 'memory'][position]} must be a tensor, but got NoneType"):
        make(ours, name, norm_first=True)(*given)


@pytest.mark.parametrize(
    ("name", "cache", "message"),
    [
        ("TransformerDecoderLayer", 3, "cache must be a pair of KeyValueCache"),
        ("TransformerDecoderLayer", (ours.KeyValueCache(),), "cache must be a pair of KeyValueCache"),
        ("TransformerDecoderLayer", (1, 2), "cache must be a KeyValueCache, but got int"),
        ("TransformerDecoder", 3, "cache must be a list of 2 pairs"),
        ("TransformerDecoder", [(None, None)], "cache must be a list of 2 pairs"),
        ("TransformerDecoder", [1, 2], "cache must be a pair of KeyValueCache"),
    ],
)
def test_wrong_caches_raise(name: str, cache: Any, message: str) -> None:
    x = torch.zeros(BATCH, TARGET, WIDTH)
    with pytest.raises(TypeError, match=message):
        make(ours, name)(x, x, cache=cache)


def test_global_hooks_see_all_modules() -> None:
    layer, seen = make(ours, "TransformerEncoderLayer"), []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        layer(torch.zeros(BATCH, SOURCE, WIDTH))
    finally:
        handle.remove()
    assert {layer.norm1, layer.norm2, layer.dropout1, layer.dropout2} <= set(seen)


# ---- what stands in for a module's forward or a layer's block must be called -----------------------------------------


def counting(module: nn.Module, calls: list[nn.Module]) -> None:
    """Replaces forward on the instance, as accelerate and recorders of activations do."""
    forward = module.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(module)
        return forward(*args, **kwargs)

    module.forward = counted


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("name", ["TransformerEncoderLayer", "TransformerDecoderLayer"])
def test_a_forward_on_the_instance_is_called(name: str, norm_first: bool) -> None:
    module, theirs = pair(name, norm_first=norm_first)
    parts = [part for part in module.modules() if type(part) in (ours.LayerNorm, nn.Dropout)]
    calls: list[nn.Module] = []
    for part in parts:
        counting(part, calls)
    torch.testing.assert_close(module(*inputs(name)), theirs(*inputs(name)))
    assert {id(part) for part in calls} == {id(part) for part in parts}


def test_parameters_that_arrive_with_the_call() -> None:
    """As with accelerate's offloading: weights live elsewhere, and come for the time of each forward."""
    module, theirs = pair("TransformerEncoderLayer")

    def offload(part: nn.Module) -> None:
        forward, kept = part.forward, {name: p.detach().clone() for name, p in part.named_parameters(recurse=False)}

        def with_weights(*args: Any, **kwargs: Any) -> Any:
            for name, value in kept.items():
                part._parameters[name] = nn.Parameter(value)
            result = forward(*args, **kwargs)
            for name, value in kept.items():
                part._parameters[name] = nn.Parameter(value.to("meta"))
            return result

        for name, value in kept.items():
            part._parameters[name] = nn.Parameter(value.to("meta"))
        part.forward = with_weights

    for part in (module.norm1, module.norm2, module.linear1, module.linear2):
        offload(part)
    torch.testing.assert_close(module(*inputs("TransformerEncoderLayer")), theirs(*inputs("TransformerEncoderLayer")))


@pytest.mark.parametrize("block", ["_sa_block", "_ff_block"])
def test_an_overridden_block_is_called(block: str) -> None:
    def halved(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x / 2

    for norm_first in (False, True):
        module, theirs = pair("TransformerEncoderLayer", norm_first=norm_first)
        module.__class__ = type("Layer", (ours.TransformerEncoderLayer,), {block: halved})
        theirs.__class__ = type("Layer", (nn.TransformerEncoderLayer,), {block: halved})
        (x,) = inputs("TransformerEncoderLayer")
        theirs.train()  # torch's fast path in evaluation does not ask
        torch.testing.assert_close(module(x), theirs(x))


def test_relu_does_not_write_into_what_was_kept() -> None:
    module, _ = pair("TransformerEncoderLayer")
    kept = []
    module.linear1.register_forward_hook(lambda _module, _args, output: kept.append((output, output.clone())))
    module(*inputs("TransformerEncoderLayer"))
    (output, copy), *_ = kept
    assert torch.equal(output, copy)


@pytest.mark.parametrize("name", ["TransformerEncoderLayer", "TransformerDecoderLayer"])
def test_copies_keep_an_activation_that_is_a_module(name: str) -> None:
    module = make(ours, name, activation=nn.GELU())
    given = tuple(tensor.float() for tensor in inputs(name))
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        torch.testing.assert_close(other(*given), module(*given))


# ---- linear layers are one operator with what follows them, unless they are not the usual ones -----------------------

ATTENTION = ["linear", "attention", "linear"]
OPERATORS = {
    ("TransformerEncoderLayer", False): [*ATTENTION, "add_layer_norm", "linear", "linear", "add_layer_norm"],
    ("TransformerEncoderLayer", True): ["layer_norm", *ATTENTION, "add_layer_norm", "linear", "linear"],
    ("TransformerDecoderLayer", False): [
        *[*ATTENTION, "add_layer_norm", "linear", *ATTENTION, "add_layer_norm"],
        *["linear", "linear", "add_layer_norm"],
    ],
    ("TransformerDecoderLayer", True): [
        *["layer_norm", *ATTENTION, "add_layer_norm", "linear", *ATTENTION, "add_layer_norm"],
        *["linear", "linear"],
    ],
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("name", "norm_first"), OPERATORS)
def test_operators_of_a_layer(name: str, norm_first: bool, training: bool) -> None:
    module = make(ours, name, norm_first=norm_first, dropout=0.1).train(training)
    given = [tensor.float() for tensor in inputs(name)]
    expected = [f"myvision.{op}" for op in OPERATORS[name, norm_first]]
    assert operators_run(module, *given) == expected
    with torch.autocast("cpu", torch.bfloat16):
        run = operators_run(module, *given)
    assert [op for op in run if op.startswith("myvision.")] == expected


@pytest.mark.parametrize(
    ("activation", "is_known"),
    [
        *[(activation, True) for activation in ("relu", "gelu", F.gelu, torch.relu, F.leaky_relu, F.silu, F.hardswish)],
        *[(module, True) for module in (nn.ReLU(), nn.GELU("tanh"), nn.LeakyReLU(0.3), nn.SiLU(), nn.Hardswish())],
        *[(activation, False) for activation in (torch.tanh, lambda x: x.square(), nn.Tanh(), nn.Softplus(2))],
    ],
    ids=lambda value: getattr(value, "__name__", repr(value)),
)
def test_known_activations_are_part_of_the_product(activation: Any, is_known: bool) -> None:
    module, theirs = pair("TransformerEncoderLayer", activation=activation)
    (x,) = inputs("TransformerEncoderLayer")
    torch.testing.assert_close(module(x), theirs(x))
    run = operators_run(module, x)
    assert run.count("myvision.linear") == 4
    assert all(op.startswith("myvision.") for op in run) == is_known


def test_an_activation_with_a_hook_is_called() -> None:
    module, theirs = pair("TransformerEncoderLayer", activation=nn.ReLU())
    for layer in (module, theirs):
        layer.activation.register_forward_hook(lambda _module, _args, output: output / 2)
    (x,) = inputs("TransformerEncoderLayer")
    torch.testing.assert_close(module(x), theirs(x))


class Adapted(nn.Linear):
    """As adapters of low rank do it: a subclass."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + input.mean(-1, keepdim=True)


class Wrapped(nn.Module):
    """The same, by a module around it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    @property
    def bias(self) -> Tensor:
        return self.base.bias

    def forward(self, input: Tensor) -> Tensor:
        return self.base(input) / 2


def adapt(layer: nn.Linear) -> nn.Module:
    layer.__class__ = Adapted
    return layer


def with_forward(layer: nn.Linear) -> nn.Module:
    layer.forward = lambda input: F.linear(input, layer.weight) - 1
    return layer


def normalised_by_hooks(layer: nn.Linear) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(layer)


FOREIGN = {
    "subclass": adapt,
    "module around it": Wrapped,
    "forward on the instance": with_forward,
    "parametrization": nn.utils.parametrizations.weight_norm,
    "weight made by a hook": normalised_by_hooks,
    "ours with an activation": lambda layer: ours.LinearAct(*reversed(layer.weight.shape)).double(),
}


@pytest.mark.parametrize("change", FOREIGN)
@pytest.mark.parametrize("norm_first", [False, True])
def test_linear_layers_of_another_kind_are_called(norm_first: bool, change: str) -> None:
    module, theirs = pair("TransformerEncoderLayer", norm_first=norm_first)
    for layer in (module, theirs):
        for name in ("linear1", "linear2"):
            torch.manual_seed(0)
            setattr(layer, name, FOREIGN[change](getattr(layer, name)))
    theirs.train()  # the fast path in evaluation does not ask
    (x,) = inputs("TransformerEncoderLayer")
    torch.testing.assert_close(module(x), theirs(x))
    for layer in (module, theirs):
        layer.zero_grad()
        layer(x).square().mean().backward()
    gradients = [{name: p.grad for name, p in layer.named_parameters()} for layer in (module, theirs)]
    torch.testing.assert_close(*gradients)


@pytest.mark.skipif(torch.backends.quantized.engine == "none", reason="torch was built without quantised kernels")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_quantised_linear_layers_are_called() -> None:
    module, _ = pair("TransformerEncoderLayer")
    (x,) = (tensor.float() for tensor in inputs("TransformerEncoderLayer"))
    quantised = torch.ao.quantization.quantize_dynamic(copy.deepcopy(module).float().eval(), {nn.Linear})
    assert type(quantised.linear1) is torch.ao.nn.quantized.dynamic.Linear
    assert operators_run(quantised, x).count("quantized.linear_dynamic") == 2
    torch.testing.assert_close(quantised(x), module.float()(x), rtol=0, atol=0.2)


class Watched(Tensor):
    """A tensor of another class, which knows torch's own functions."""

    functions: ClassVar[list[Any]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.functions.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_weights_of_another_class_meet_torchs_functions() -> None:
    module, _ = pair("TransformerEncoderLayer")
    (x,) = inputs("TransformerEncoderLayer")
    expected = module(x)
    for layer in (module.linear1, module.linear2, module.self_attn.out_proj):
        layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Watched))
    module.self_attn.in_proj_weight = nn.Parameter(module.self_attn.in_proj_weight.detach().as_subclass(Watched))
    Watched.functions.clear()
    torch.testing.assert_close(module(x).as_subclass(Tensor), expected)
    assert Watched.functions.count(F.linear) == 4
    assert not any(
        getattr(function, "__module__", "").startswith("myvision.ops.linear") for function in Watched.functions
    )


def test_export_without_private_names_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in for tensors there is then taken for a class of its own."""
    monkeypatch.setattr("myvision._dispatch.overrides.PLAIN", (Tensor, nn.Parameter))
    module = make(ours, "TransformerEncoderLayer").eval()
    x = random_tensor(BATCH, SOURCE, WIDTH)
    exported = torch.export.export(module, (x,))
    torch.testing.assert_close(exported.module()(x), module(x))
    assert sum("linear" in str(node.target) for node in exported.graph.nodes if node.op == "call_function") == 4


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed")
def test_sharded_linear_layers_are_called() -> None:
    """As under tensor parallelism; a group of one is enough to have weights of another class."""
    printed = run_python("""
import tempfile, torch, myvision.nn as ours
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

with tempfile.TemporaryDirectory() as directory:
    distributed.init_process_group("gloo", init_method=f"file://{directory}/store", rank=0, world_size=1)
    layer = ours.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    x = torch.rand(2, 3, 8)
    expected = layer(x)
    plan = {"linear1": ColwiseParallel(), "linear2": RowwiseParallel()}
    parallelize_module(layer, init_device_mesh("cpu", (1,)), plan)
    torch.testing.assert_close(layer(x), expected)
    layer(x).sum().backward()
    print(type(layer.linear1.weight.grad).__name__)
    distributed.destroy_process_group()
""")
    assert printed.split()[-1] == "DTensor"


@pytest.mark.parametrize("dropped", ["dropout", "dropout2"])
def test_the_share_of_what_is_dropped(dropped: str) -> None:
    """Behind the activation, and behind the second product with the residual."""
    layer = make(ours, "TransformerEncoderLayer", norm_first=True)
    layer.get_submodule(dropped).p = 0.25
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        layer.linear1.bias.fill_(1)
        layer.linear2.weight.copy_(torch.eye(16)[:WIDTH])  # the network gives 1 everywhere
    x = torch.arange(4000.0).view(1, 500, WIDTH) / 4000
    torch.manual_seed(0)
    added = layer(x) - x
    kept = added.count_nonzero() / added.numel()
    assert kept.item() == pytest.approx(0.75, abs=0.03)
    assert added.round(decimals=2).unique().tolist() == pytest.approx([0, 1.33])
    assert torch.equal(layer.eval()(x), x + 1)


def test_autocast_keeps_the_residual_wide() -> None:
    module, theirs = (layer.float() for layer in pair("TransformerEncoderLayer", norm_first=True))
    (x,) = (1000 + tensor.float() for tensor in inputs("TransformerEncoderLayer"))
    with torch.autocast("cpu", torch.bfloat16):
        output, expected = module(x), theirs(x)
    assert output.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(output, expected, rtol=0, atol=0.5)  # bfloat16 rounds off up to 2 of 1000


@pytest.mark.parametrize("norm_first", [False, True])
def test_second_derivatives_and_vmap(norm_first: bool) -> None:
    module, theirs = pair("TransformerEncoderLayer", norm_first=norm_first, activation="gelu")
    (x,) = inputs("TransformerEncoderLayer")
    results = []
    for layer in (module, theirs):
        leaf = x.clone().requires_grad_()
        with sdpa_kernel(SDPBackend.MATH):
            (gradient,) = torch.autograd.grad(layer(leaf).pow(3).sum(), leaf, create_graph=True)
            results.append(torch.autograd.grad(gradient.pow(2).sum(), [leaf, *layer.parameters()]))
    torch.testing.assert_close(*results)
    batch = torch.stack([x, x.flip(1)])
    torch.testing.assert_close(torch.func.vmap(module)(batch), torch.stack([module(part) for part in batch]))
