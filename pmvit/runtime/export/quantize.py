"""Post-training quantisation of exported models to eight bits, calibrated on images."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from pmvit.errors import PmvitError
from pmvit.runtime.export.targets import quietly


def quantize_onnx(path: Path, batches: list[Tensor]) -> None:
    """Quantise an ONNX file in place with ONNX Runtime: weights by channel, matrix products with weights only."""
    from onnxruntime import quantization

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]  # has no types
        def __init__(self) -> None:
            self._left = iter(batches)

        def get_next(self) -> Any:
            batch = next(self._left, None)
            return None if batch is None else {"images": batch.numpy()}

    prepared = path.with_suffix(".prepared.onnx")
    with quietly():
        quantization.shape_inference.quant_pre_process(str(path), str(prepared))
        quantization.quantize_static(
            str(prepared),
            str(path),
            Reader(),
            per_channel=True,
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
            op_types_to_quantize=["MatMul", "Gemm"],
            extra_options={"MatMulConstBOnly": True, "ActivationSymmetric": False},
        )
    prepared.unlink()


def quantize_openvino(path: Path, batches: list[Tensor]) -> None:
    """Quantise OpenVINO's files in place with NNCF, which knows transformers."""
    try:
        with quietly():
            import nncf
    except ImportError:
        raise PmvitError(
            "expected the package nncf to quantise for openvino; there is none: pip install 'pmvit[openvino]'"
        ) from None
    import openvino

    with quietly():
        model = openvino.Core().read_model(path)
        quantized = nncf.quantize(
            model,
            nncf.Dataset([batch.numpy() for batch in batches]),
            model_type=nncf.ModelType.TRANSFORMER,
            subset_size=len(batches),
        )
        del model
        temporary = path.with_name(f"int8_{path.name}")
        openvino.save_model(quantized, temporary, compress_to_fp16=False)
    temporary.replace(path)
    temporary.with_suffix(".bin").replace(path.with_suffix(".bin"))


QUANTIZERS: dict[str, Callable[[Path, list[Tensor]], None]] = {"onnx": quantize_onnx, "openvino": quantize_openvino}
