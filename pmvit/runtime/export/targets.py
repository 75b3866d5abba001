"""Where a model can run: for each runtime, how its file is written and how it is opened again.

A runtime takes a model in float32 that `optimize_for_inference` has made ready, and gives it back as a function from a
batch of images to logits, both as tensors; several feature maps are as many outputs of a file, and one row of the
tensor. Packages are imported when they are needed.
"""

import importlib
import io
import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pmvit._system import avoid_broken_amx
from pmvit.config.inference import Target
from pmvit.errors import PmvitError
from pmvit.hosts.outputs import as_tensor
from pmvit.runtime.export.int8 import WAYS, Way, quantize_onnx, quantize_openvino

Run = Callable[[Tensor], Tensor]
OPSET = 20  # the first with Gelu, which runtimes then need not recognise in five operators


@contextmanager
def quietly() -> Iterator[None]:
    """Without the warnings and prints of converters, which are about their own insides."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


class Runtime(ABC):
    """One way to run a model."""

    name: str  # what users call it
    suffix: str  # the ending of its files
    packages: tuple[str, ...] = ()  # what has to be installed, by the name it is imported under
    extra: str = ""  # the extra of pmvit that installs them
    target: Target = "graph"  # what the passes prepare a model for
    fixed_batch: bool = False  # its files are for one batch size only

    def check(self) -> None:
        """Raise `PmvitError` if something is missing that this runtime needs."""
        for package in self.packages:
            try:
                with quietly():
                    importlib.import_module(package)
            except ImportError as error:
                raise PmvitError(
                    f"expected the package {package} for {self.name}; it cannot be imported ({error}): "
                    f"pip install 'pmvit[{self.extra}]'"
                ) from None

    @quietly()
    def make(
        self, model: nn.Module, path: Path, images: Tensor, any_batch: bool, calibration: Sequence[Tensor], threads: int
    ) -> Run:
        """Write a model, quantise it if there are images to calibrate on, and open it."""
        if not calibration:
            self.write(model, path, images, any_batch)
            return self.open(path, threads)
        exact = path.with_stem(f"{path.stem}.float")
        self.write(model, exact, images, any_batch)
        self.quantize(exact, path, calibration, WAYS[0])
        return self.open(path, threads)

    @abstractmethod
    def write(self, model: nn.Module, path: Path, images: Tensor, any_batch: bool) -> None:
        """Write the model for batches like `images`, or for any batch size."""

    @abstractmethod
    def open(self, path: Path, threads: int) -> Run:
        """Open what `write` wrote."""

    def quantize(self, path: Path, output: Path, batches: Sequence[Tensor], way: Way) -> None:
        """Quantise what `write` wrote to eight bits, in one of several ways, calibrated on images."""
        raise PmvitError(f"expected {' or '.join(QUANTIZING)} for int8; got {self.name}")


@quietly()
def as_exported(model: nn.Module, images: Tensor, any_batch: bool) -> Any:
    """The model as torch.export has it."""
    batch = ({0: torch.export.Dim("batch", min=1, max=4096)},) if any_batch else None
    with torch.no_grad():
        return torch.export.export(model, (images,), dynamic_shapes=batch)


class Onnx(Runtime):
    """ONNX with standard operators only, run by ONNX Runtime."""

    name, suffix, packages, extra = "onnx", ".onnx", ("onnx", "onnxscript", "onnxruntime"), "onnx"
    target: Target = "onnx"

    def write(self, model: nn.Module, path: Path, images: Tensor, any_batch: bool) -> None:
        exported = as_exported(model, images, any_batch)
        program: Any = torch.onnx.export(
            exported,
            dynamo=True,
            opset_version=OPSET,
            input_names=["images"],
            output_names=output_names(len(exported.graph_signature.user_outputs)),
            verbose=False,
        )
        program.save(str(path))

    def open(self, path: Path, threads: int) -> Run:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        # Threads that wait busily take the cores from whatever else runs in the process.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        return lambda images: as_tensor([*map(torch.from_numpy, session.run(None, {"images": images.numpy()}))])

    def quantize(self, path: Path, output: Path, batches: Sequence[Tensor], way: Way) -> None:
        quantize_onnx(path, output, batches, way)


class OpenVino(Runtime):
    """OpenVINO's intermediate representation: an .xml file and its .bin beside it."""

    name, suffix, packages, extra = "openvino", ".xml", ("openvino",), "openvino"

    def check(self) -> None:
        super().check()
        avoid_broken_amx()

    def write(self, model: nn.Module, path: Path, images: Tensor, any_batch: bool) -> None:
        import openvino

        converted = openvino.convert_model(as_exported(model, images, any_batch))
        converted.inputs[0].get_tensor().set_names({"images"})
        for output, name in zip(converted.outputs, output_names(len(converted.outputs)), strict=True):
            output.get_tensor().set_names({name})
        openvino.save_model(converted, path, compress_to_fp16=False)

    def open(self, path: Path, threads: int) -> Run:
        import openvino

        core = openvino.Core()
        settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
        request = core.compile_model(core.read_model(path), "CPU", settings).create_infer_request()

        def run(images: Tensor) -> Tensor:
            outputs = request.infer({0: images.numpy()}).values()
            return as_tensor([torch.from_numpy(output.copy()) for output in outputs])

        return run

    def quantize(self, path: Path, output: Path, batches: Sequence[Tensor], way: Way) -> None:
        try:
            importlib.import_module("nncf")
        except ImportError:
            raise PmvitError(
                "expected the package nncf to quantise for openvino; there is none: pip install 'pmvit[openvino]'"
            ) from None
        quantize_openvino(path, output, batches, way)


class TorchExport(Runtime):
    """A torch.export program: PyTorch without the model's Python code."""

    name, suffix = "torch-export", ".pt2"

    def write(self, model: nn.Module, path: Path, images: Tensor, any_batch: bool) -> None:
        torch.export.save(as_exported(model, images, any_batch), path)

    def open(self, path: Path, threads: int) -> Run:
        return inferring(torch.export.load(path).module())


class AotInductor(Runtime):
    """A package of machine code compiled ahead of time by TorchInductor; needs a C++ compiler to make, none to run."""

    name, suffix = "aot-inductor", ".pt2"

    def write(self, model: nn.Module, path: Path, images: Tensor, any_batch: bool) -> None:
        torch._inductor.aoti_compile_and_package(as_exported(model, images, any_batch), package_path=str(path))

    def open(self, path: Path, threads: int) -> Run:
        return inferring(torch._inductor.aoti_load_package(str(path)))


class TorchScript(Runtime):
    """A TorchScript trace, for LibTorch."""

    name, suffix = "torchscript", ".pt"

    @torch.no_grad()
    def write(self, model: nn.Module, path: Path, images: Tensor, any_batch: bool) -> None:
        torch.jit.save(torch.jit.trace(model, images, check_trace=False), str(path))

    def open(self, path: Path, threads: int) -> Run:
        return inferring(torch.jit.load(str(path)))


class ExecuTorch(Runtime):
    """ExecuTorch with XNNPACK, for phones and boards; one batch size a file."""

    name, suffix, packages, extra = "executorch", ".pte", ("executorch.exir", "executorch.runtime"), "executorch"
    fixed_batch = True

    def write(self, model: nn.Module, path: Path, images: Tensor, any_batch: bool) -> None:
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import to_edge_transform_and_lower

        exported = as_exported(model, images, any_batch=False)
        lowered = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()])
        path.write_bytes(lowered.to_executorch().buffer)

    def open(self, path: Path, threads: int) -> Run:
        from executorch.runtime import Runtime as Interpreter

        program = Interpreter.get().load_program(path)
        method = program.load_method("forward")  # lives only as long as its program

        def run(images: Tensor, keep: Any = program) -> Tensor:
            return as_tensor([output.clone() for output in method.execute([images.contiguous()])])

        return run


class LiteRt(Runtime):
    """LiteRT (TensorFlow Lite) with XNNPACK; one batch size a file."""

    name, suffix, packages, extra = "litert", ".tflite", ("litert_torch", "ai_edge_litert.interpreter"), "litert"
    fixed_batch = True

    def write(self, model: nn.Module, path: Path, images: Tensor, any_batch: bool) -> None:
        import litert_torch

        litert_torch.convert(model, (images,)).export(str(path))

    def open(self, path: Path, threads: int) -> Run:
        from ai_edge_litert.interpreter import Interpreter

        interpreter = Interpreter(str(path), num_threads=threads)
        interpreter.allocate_tensors()
        (given,), returned = interpreter.get_input_details(), interpreter.get_output_details()

        def run(images: Tensor) -> Tensor:
            interpreter.set_tensor(given["index"], images.numpy())
            interpreter.invoke()
            return as_tensor([torch.from_numpy(interpreter.get_tensor(output["index"])) for output in returned])

        return run


def inferring(module: Callable[[Tensor], Any]) -> Run:
    """A PyTorch module as the other runtimes are: called in inference mode."""

    def run(images: Tensor) -> Tensor:
        with torch.inference_mode():
            return as_tensor(module(images))

    return run


def output_names(count: int) -> list[str]:
    """What the outputs of a file are called: logits, or features by number if there are several."""
    return ["logits"] if count == 1 else [f"features_{number}" for number in range(count)]


def reason(error: Exception, most: int = 300) -> str:
    """What went wrong, on one line: how it begins and, as converters say what it was at the end, its last lines."""
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()]
    first, last = " ".join(lines[:1]), " ".join(lines[1:])
    text = first if len(first) <= most else f"{first[:most]} ..."
    if last:
        text = f"{text[: most // 3]} ... {last[-most:]}" if len(text) + len(last) > most else f"{text} {last}"
    return f"{type(error).__name__}: {text}"


RUNTIMES: dict[str, Runtime] = {
    runtime.name: runtime
    for runtime in (Onnx(), OpenVino(), TorchExport(), AotInductor(), TorchScript(), ExecuTorch(), LiteRt())
}
QUANTIZING = [name for name, runtime in RUNTIMES.items() if type(runtime).quantize is not Runtime.quantize]


def runtime_called(name: str) -> Runtime:
    """Find a runtime by name.

    Raises:
        PmvitError: If there is none of that name, or its packages are missing.
    """
    if name not in RUNTIMES:
        raise PmvitError(f"expected one of {', '.join(RUNTIMES)} to export to; got {name!r}")
    RUNTIMES[name].check()
    return RUNTIMES[name]
