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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pmvit._system import avoid_broken_amx
from pmvit.config.inference import Target
from pmvit.errors import PmvitError
from pmvit.hosts.outputs import as_tensor

Run = Callable[[Tensor], Tensor]
OPSET = 20  # the first with Gelu, which runtimes then need not recognise in five operators


class Runtime(ABC):
    """One way to run a model.

    Attributes:
        name: What users call it.
        suffix: The ending of its files.
        packages: What has to be installed, by the name it is imported under.
        extra: The extra of pmvit that installs them.
        target: What the passes prepare a model for.
        fixed_batch: Its files are for one batch size only.
    """

    name: str
    suffix: str
    packages: tuple[str, ...] = ()
    extra: str = ""
    target: Target = "graph"
    fixed_batch: bool = False

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

    @abstractmethod
    def write(self, model: nn.Module, path: Path, images: Tensor, any_batch: bool) -> None:
        """Write the model for batches like `images`, or for any batch size."""

    @abstractmethod
    def open(self, path: Path, threads: int) -> Run:
        """Open what `write` wrote."""


def as_exported(model: nn.Module, images: Tensor, any_batch: bool) -> Any:
    """The model as torch.export has it."""
    batch = ({0: torch.export.Dim("batch", min=1, max=4096)},) if any_batch else None
    with torch.no_grad(), quietly():
        return torch.export.export(model, (images,), dynamic_shapes=batch)


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


class Onnx(Runtime):
    """ONNX with standard operators only, run by ONNX Runtime."""

    name, suffix, packages, extra = "onnx", ".onnx", ("onnx", "onnxscript", "onnxruntime"), "onnx"
    target: Target = "onnx"

    def write(self, model: nn.Module, path: Path, images: Tensor, any_batch: bool) -> None:
        exported = as_exported(model, images, any_batch)
        with quietly():
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
        return lambda images: joined(map(torch.from_numpy, session.run(None, {"images": images.numpy()})))


class OpenVino(Runtime):
    """OpenVINO's intermediate representation: an .xml file and its .bin beside it."""

    name, suffix, packages, extra = "openvino", ".xml", ("openvino",), "openvino"

    def check(self) -> None:
        super().check()
        avoid_broken_amx()

    def write(self, model: nn.Module, path: Path, images: Tensor, any_batch: bool) -> None:
        import openvino

        with quietly():
            converted = openvino.convert_model(as_exported(model, images, any_batch))
            converted.inputs[0].get_tensor().set_names({"images"})
            for output, name in zip(converted.outputs, output_names(len(converted.outputs)), strict=True):
                output.get_tensor().set_names({name})
            openvino.save_model(converted, path, compress_to_fp16=False)

    def open(self, path: Path, threads: int) -> Run:
        import openvino

        core = openvino.Core()
        settings = {
            "INFERENCE_NUM_THREADS": threads,
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "f32",
        }
        request = core.compile_model(core.read_model(path), "CPU", settings).create_infer_request()

        def run(images: Tensor) -> Tensor:
            return joined(torch.from_numpy(output.copy()) for output in request.infer({0: images.numpy()}).values())

        return run


class TorchExport(Runtime):
    """A torch.export program: PyTorch without the model's Python code."""

    name, suffix = "torch-export", ".pt2"

    def write(self, model: nn.Module, path: Path, images: Tensor, any_batch: bool) -> None:
        with quietly():
            torch.export.save(as_exported(model, images, any_batch), path)

    def open(self, path: Path, threads: int) -> Run:
        with quietly():
            return inferring(torch.export.load(path).module())


class AotInductor(Runtime):
    """A package of machine code compiled ahead of time by TorchInductor; needs a C++ compiler to make, none to run."""

    name, suffix = "aot-inductor", ".pt2"

    def write(self, model: nn.Module, path: Path, images: Tensor, any_batch: bool) -> None:
        exported = as_exported(model, images, any_batch)
        with quietly():
            torch._inductor.aoti_compile_and_package(exported, package_path=str(path))

    def open(self, path: Path, threads: int) -> Run:
        with quietly():
            return inferring(torch._inductor.aoti_load_package(str(path)))


class TorchScript(Runtime):
    """A TorchScript trace, for LibTorch."""

    name, suffix = "torchscript", ".pt"

    def write(self, model: nn.Module, path: Path, images: Tensor, any_batch: bool) -> None:
        with quietly(), torch.no_grad():
            torch.jit.save(torch.jit.trace(model, images, check_trace=False), str(path))

    def open(self, path: Path, threads: int) -> Run:
        with quietly():
            return inferring(torch.jit.load(str(path)))


class ExecuTorch(Runtime):
    """ExecuTorch with XNNPACK, for phones and boards; one batch size a file."""

    name, suffix, packages, extra = "executorch", ".pte", ("executorch.exir", "executorch.runtime"), "executorch"
    fixed_batch = True

    def write(self, model: nn.Module, path: Path, images: Tensor, any_batch: bool) -> None:
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import to_edge_transform_and_lower

        exported = as_exported(model, images, any_batch=False)
        with quietly():
            lowered = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()])
            path.write_bytes(lowered.to_executorch().buffer)

    def open(self, path: Path, threads: int) -> Run:
        from executorch.runtime import Runtime as Interpreter

        program = Interpreter.get().load_program(path)
        method = program.load_method("forward")  # lives only as long as its program

        def run(images: Tensor, keep: Any = program) -> Tensor:
            return joined(output.clone() for output in method.execute([images.contiguous()]))

        return run


class LiteRt(Runtime):
    """LiteRT (TensorFlow Lite) with XNNPACK; one batch size a file."""

    name, suffix, packages, extra = "litert", ".tflite", ("litert_torch", "ai_edge_litert.interpreter"), "litert"
    fixed_batch = True

    def write(self, model: nn.Module, path: Path, images: Tensor, any_batch: bool) -> None:
        import litert_torch

        with quietly():
            litert_torch.convert(model, (images,)).export(str(path))

    def open(self, path: Path, threads: int) -> Run:
        from ai_edge_litert.interpreter import Interpreter

        interpreter = Interpreter(str(path), num_threads=threads)
        interpreter.allocate_tensors()
        (given,), returned = interpreter.get_input_details(), interpreter.get_output_details()

        def run(images: Tensor) -> Tensor:
            interpreter.set_tensor(given["index"], images.numpy())
            interpreter.invoke()
            return joined(torch.from_numpy(interpreter.get_tensor(output["index"])) for output in returned)

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


def joined(outputs: Iterable[Tensor]) -> Tensor:
    """What a runtime returned as one tensor: several feature maps as one row for each image."""
    return as_tensor(tuple(outputs))


RUNTIMES: dict[str, Runtime] = {
    runtime.name: runtime
    for runtime in (Onnx(), OpenVino(), TorchExport(), AotInductor(), TorchScript(), ExecuTorch(), LiteRt())
}


def runtime_called(name: str) -> Runtime:
    """Find a runtime by name.

    Raises:
        PmvitError: If there is none of that name, or its packages are missing.
    """
    if name not in RUNTIMES:
        raise PmvitError(f"expected one of {', '.join(RUNTIMES)} to export to; got {name!r}")
    RUNTIMES[name].check()
    return RUNTIMES[name]
