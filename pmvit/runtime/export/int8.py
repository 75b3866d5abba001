"""Eight bits after training, for ONNX Runtime and OpenVINO: what is quantised, and which products suffer most from it.

Weights are quantised by output channel, activations as a whole. Of the weights' eight bits seven are used: processors
without instructions for eight bits (VNNI, AMX) add two products of a weight and an activation in sixteen bits, which
overflow otherwise, so that a file would give something else there than where it was compared. Products without weights
stay in float: those of attention, and those that merge tokens, of which all that follows is made. So does what a plan
that adapts to the image compares tokens by: there, a little noise chooses other tokens.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Node = TypeVar("Node")
Array = NDArray[np.float32]
ONNX_PRODUCTS = ("MatMul", "Gemm")
CHOOSING = {"TopK", "ArgMin", "ArgMax", "Equal"}  # what follows from these are places, not numbers
RANKED_ON = 8  # images
WEIGHT_STEPS = 63  # from none to the largest weight of a channel


class Way(NamedTuple):
    """One way to quantise a model: the share of its products with weights that stays in float, the most sensitive."""

    title: str
    in_float: float


WAYS = (
    Way("all products with weights", 0.0),
    Way("without the most sensitive eighth", 1 / 8),
    Way("without the most sensitive quarter", 1 / 4),
    Way("without the most sensitive half", 1 / 2),
)


class Product(NamedTuple):
    """A product of activations with weights: what comes in, (rows, inputs), and the weights, (inputs, outputs)."""

    activations: Array
    weights: Array


def only_chooses(node: Node, after: Callable[[Node], Iterable[Node]], kind: Callable[[Node], str]) -> bool:
    """Whether nothing comes of a node but a choice: every way on from it goes through one."""
    to_do: list[Node] = [node]
    seen: list[Node] = []
    while to_do:
        here = to_do.pop()
        following = list(after(here))
        if not following:  # an output of the model
            return False
        for other in following:
            if kind(other) not in CHOOSING and not any(other is known for known in seen):
                seen.append(other)
                to_do.append(other)
    return True


def most_sensitive(products: dict[str, Product], share: float) -> list[str]:
    """Names of the products that lose most of their own result to eight bits, this share of all."""
    errors = {name: relative_error(product) for name, product in products.items()}
    ranked = sorted(errors, key=lambda name: -errors[name])
    return ranked[: round(share * len(ranked))]


def relative_error(product: Product) -> float:
    """What eight bits change in a product, as a share of its energy, on average over rows.

    Row by row, because one token with huge numbers takes the range of all others, and the energy of the whole, too.
    """
    exact = product.activations @ product.weights
    low, high = min(0.0, float(product.activations.min())), max(0.0, float(product.activations.max()))
    step = max(high - low, 1e-12) / 255
    activations = np.round(product.activations / step) * step
    steps = np.maximum(np.abs(product.weights).max(0), 1e-12) / WEIGHT_STEPS
    change = activations @ (np.round(product.weights / steps) * steps) - exact
    return float((np.square(change).sum(1) / np.maximum(np.square(exact).sum(1), 1e-12)).mean())


def quantize_onnx(path: Path, output: Path, batches: Sequence[Tensor], way: Way) -> None:
    """Quantise a file with ONNX Runtime's own tools; what comes out of products stays in float."""
    import onnx
    from onnxruntime import quantization

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]  # has no types
        def __init__(self) -> None:
            self._left = iter(batches)

        def get_next(self) -> Any:
            batch = next(self._left, None)
            return None if batch is None else {"images": batch.numpy()}

    prepared = output.with_suffix(".prepared.onnx")
    quantization.shape_inference.quant_pre_process(str(path), str(prepared), skip_symbolic_shape=True)
    model = onnx.load(prepared)
    products = _onnx_products(model)
    in_float = most_sensitive(_onnx_inputs(model, products, batches), way.in_float) if way.in_float else []
    quantization.quantize_static(
        str(prepared),
        str(output),
        Reader(),
        per_channel=True,
        reduce_range=True,
        activation_type=quantization.QuantType.QUInt8,
        weight_type=quantization.QuantType.QInt8,
        op_types_to_quantize=list(ONNX_PRODUCTS),
        nodes_to_quantize=[name for name in products if name not in in_float],
        extra_options={"OpTypesToExcludeOutputQuantization": list(ONNX_PRODUCTS)},
    )
    prepared.unlink()


def _onnx_products(model: Any) -> dict[str, tuple[str, Array]]:
    """What comes into products with weights, and their weights, by the names of their nodes."""
    from onnx import numpy_helper

    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    users: dict[str, list[Any]] = {}
    for node in model.graph.node:
        for name in node.input:
            users.setdefault(name, []).append(node)

    def after(node: Any) -> list[Any]:
        return [user for name in node.output for user in users.get(name, ())]

    products = {}
    for node in model.graph.node:
        if node.op_type not in ONNX_PRODUCTS or node.input[1] not in stored:
            continue
        if not only_chooses(node, after, lambda one: str(one.op_type)):
            weights = numpy_helper.to_array(stored[node.input[1]])
            is_turned = any(attribute.name == "transB" and attribute.i for attribute in node.attribute)
            products[node.name] = (node.input[0], weights.T if is_turned else weights)
    return products


def _onnx_inputs(model: Any, products: dict[str, tuple[str, Array]], batches: Sequence[Tensor]) -> dict[str, Product]:
    """What comes into products when a model runs on some images."""
    import onnxruntime
    from onnx import ModelProto, ValueInfoProto

    opened = ModelProto()
    opened.CopyFrom(model)
    names = list(dict.fromkeys(name for name, _ in products.values()))
    opened.graph.output.extend(ValueInfoProto(name=name) for name in names)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(opened.SerializeToString(), options, providers=["CPUExecutionProvider"])
    runs = [session.run(names, {"images": batch.numpy()}) for batch in batches[:RANKED_ON]]
    found = {name: rows(run[index] for run in runs) for index, name in enumerate(names)}
    return {name: Product(found[source], weights) for name, (source, weights) in products.items()}


def rows(arrays: Iterable[Any]) -> Array:
    """Arrays of any shape as rows of one table."""
    return np.concatenate([array.reshape(-1, array.shape[-1]) for array in arrays])


def quantize_openvino(path: Path, output: Path, batches: Sequence[Tensor], way: Way) -> None:
    """Quantise a file with NNCF, which knows transformers: it evens out channels between norms and products."""
    import nncf
    import openvino

    model = openvino.Core().read_model(path)
    products, in_float = _openvino_products(model)
    if way.in_float:
        in_float |= set(most_sensitive(_openvino_inputs(model, products, batches), way.in_float))
    quantized = nncf.quantize(
        model,
        nncf.Dataset([batch.numpy() for batch in batches]),
        model_type=nncf.ModelType.TRANSFORMER,
        subset_size=len(batches),
        ignored_scope=nncf.IgnoredScope(names=sorted(in_float), types=_others(model), validate=False),
        advanced_parameters=nncf.AdvancedQuantizationParameters(overflow_fix=nncf.OverflowFix.ENABLE),
    )
    openvino.save_model(quantized, output, compress_to_fp16=False)


def _others(model: Any) -> list[str]:
    """All operators but products and the embedding of patches.

    NNCF would quantise some of them, sizes of groups on their way to attention among them.
    """
    kinds = {node.get_type_name() for node in model.get_ordered_ops()}
    return sorted(kinds - {"MatMul", "Convolution", "Constant", "Parameter", "Result"})


def _openvino_products(model: Any) -> tuple[dict[str, Any], set[str]]:
    """Products with weights, by name; and the names of those that have to stay in float."""

    def after(node: Any) -> list[Any]:
        return [user.get_node() for output in node.outputs() for user in output.get_target_inputs()]

    products, in_float = {}, set()
    for node in model.get_ordered_ops():
        if node.get_type_name() == "MatMul":
            is_weighted = node.input_value(1).get_node().get_type_name() == "Constant"
            if is_weighted and not only_chooses(node, after, lambda one: str(one.get_type_name())):
                products[node.get_friendly_name()] = node
            else:
                in_float.add(node.get_friendly_name())
        elif node.get_type_name() == "Reshape" and _stops_passes(node):
            source = node.input_value(0).get_node()
            while source.get_type_name() in ("Add", "Multiply"):
                source = source.input_value(0).get_node()
            if source.get_type_name() == "MatMul":
                in_float.add(source.get_friendly_name())
    return {name: node for name, node in products.items() if name not in in_float}, in_float


def _stops_passes(reshape: Any) -> bool:
    """Whether OpenVINO's passes for eight bits stop at a reshape of an open number of rows to as open a batch.

    They take its second dimension for channels if there are no fewer of these than columns, and want to share out the
    scales of the columns among them.
    """
    before, after = reshape.input_value(0).get_partial_shape(), reshape.output(0).get_partial_shape()
    if before.rank.is_dynamic or after.rank.is_dynamic or len(before) != 2 or len(after) < 3:
        return False
    is_open = before[0].is_dynamic and after[0].is_dynamic and before[1].is_static and after[1].is_static
    return bool(is_open and after[1].get_length() >= before[1].get_length())


def _openvino_inputs(model: Any, products: dict[str, Any], batches: Sequence[Tensor]) -> dict[str, Product]:
    """What comes into products when a model runs on some images."""
    import openvino

    opened, by_name = model.clone(), {}
    for node in opened.get_ordered_ops():
        if node.get_friendly_name() in products:
            by_name[node.get_friendly_name()] = len(opened.outputs)
            opened.add_outputs(node.input_value(0))
    request = openvino.Core().compile_model(opened, "CPU", {"INFERENCE_PRECISION_HINT": "f32"}).create_infer_request()
    runs = []
    for batch in batches[:RANKED_ON]:
        results = request.infer({0: batch.numpy()})
        runs.append({name: results[index].copy() for name, index in by_name.items()})
    found = {}
    for name, node in products.items():
        weights = node.input_value(1).get_node().data
        is_turned = node.get_attributes().get("transpose_b", False)
        found[name] = Product(rows(run[name] for run in runs), weights.T if is_turned else weights)
    return found
