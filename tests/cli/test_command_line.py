"""The command line itself: how fast it helps, what it completes, its exit codes, and JSON alone on standard output."""

import inspect
import io
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import pytest
from typer.models import ArgumentInfo

import pmvit
from pmvit.cli import app, completion
from pmvit.cli.screen import Screen
from pmvit.config import FinetuneConfig
from pmvit.data.demo import demo_model
from pmvit.runtime.bench.table import Benchmark
from tests.cli.test_cli import listen_to_interrupts
from tests.helpers import pmvit_here, small_plan

import timm  # isort: skip  # after pmvit, which lets torchvision import
from torchvision.models import list_models  # isort: skip

HELP = [("--help",), ("run", "--help")]
VERBS = (
    *("measure", "plan", "compress", "calibrate", "finetune", "run", "evaluate", "segment", "compare", "curve"),
    *("export", "benchmark", "report", "visualize", "serve", "push", "info", "demo"),
)
SLOW = {"torch", "timm", "numpy", "rich", "pydantic"}


def cpu_seconds(*arguments: str) -> float:
    """What a process of the command line takes of a processor, however busy that is with others."""
    process = subprocess.Popen([sys.executable, "-m", "pmvit", *arguments], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_utime + usage.ru_stime


def completed(shell: str, words: str) -> list[str]:
    """What the shell offers for the last of these words."""
    number = len(words.split(" ")) - 1
    asked = {"_PMVIT_COMPLETE": f"complete_{shell}", "COMP_WORDS": words, "COMP_CWORD": str(number)}
    asked |= {"_TYPER_COMPLETE_ARGS": words, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    command = [sys.executable, "-X", "importtime", "-m", "pmvit"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **asked})
    assert loaded(result.stderr).isdisjoint({"torch", "timm"})
    return result.stdout.split()


def loaded(said: str) -> set[str]:
    """The packages that `-X importtime` says were imported."""
    return {line.rpartition("|")[2].strip().partition(".")[0] for line in said.splitlines() if "|" in line}


@pytest.mark.parametrize("arguments", HELP)
def test_help_is_instant(arguments: tuple[str, ...]) -> None:
    assert any(cpu_seconds(*arguments) < 0.3 for _ in range(5))
    command = [sys.executable, "-X", "importtime", "-m", "pmvit", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "Usage: pmvit" in result.stdout
    assert loaded(result.stderr).isdisjoint(SLOW)


READ_A_PLAN = "from pmvit.planning import Plan; Plan.from_json(Plan.keep_all((2, 2), 1).to_json())"


@pytest.mark.parametrize("used", ["dir(pmvit)", READ_A_PLAN], ids=["names", "plans"])
def test_importing_pmvit_and_reading_plans_needs_no_torch(used: str) -> None:
    code = f"import sys, pmvit; {used}; sys.exit(any(name in sys.modules for name in ('torch', 'timm', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_verbs_models_and_values(shell: str) -> None:
    said = " ".join(completed(shell, "pmvit compress deit_tiny"))
    assert "deit_tiny_patch16_224" in said
    assert "deit_tiny_distilled_patch16_224" in said
    assert "vit_tiny" not in said
    if shell == "bash":
        assert completed(shell, "pmvit compr") == ["compress"]
        assert completed(shell, "pmvit plan s --grouping ") == ["grid", "row", "segment"]
        assert completed(shell, "pmvit benchmark m --runtime eager,onn") == ["eager,onnxruntime"]


def test_scripts_for_shells_name_the_command(tmp_path: Path) -> None:
    environment = {**os.environ, "HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    for shell in ("bash", "zsh", "fish"):
        command = [sys.executable, "-m", "pmvit", "--show-completion", shell]
        result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert result.returncode == 0, result.stderr
        assert "_PMVIT_COMPLETE" in result.stdout
    command[-2:] = ["--install-completion", "bash"]
    assert subprocess.run(command, capture_output=True, check=False, env=environment).returncode == 0
    assert "_PMVIT_COMPLETE" in next(tmp_path.glob(".bash_completions/*")).read_text()


def test_architectures_are_completed_as_libraries_have_them() -> None:
    known = {file: timm.list_models(module=file) for file in completion.FILES["timm"]}
    assert completion.architectures("timm") == sorted(name for names in known.values() for name in names)
    there = [name for kind in ("vit_*", "swin_*") for name in list_models(include=kind)]
    assert completion.architectures("torchvision") == sorted(there)


def test_verbs_are_listed_in_the_order_of_work_and_help_is_short() -> None:
    said = pmvit_here("-h").stdout
    listed = [line.split()[0] for line in said.partition("Commands:")[2].splitlines() if line.startswith("  ")]
    assert tuple(listed) == VERBS
    assert {command.callback.__name__ for command in app.registered_commands if command.callback} == set(VERBS)
    assert pmvit_here("--version").stdout.strip() == f"pmvit {pmvit.__version__}"
    for verb in VERBS:
        said = pmvit_here(verb, "-h").stdout
        assert f"Usage: pmvit {verb}" in said
        assert "-h, --help" in said


def test_one_word_means_one_thing() -> None:
    """A flag has one type in all verbs: --limit counts images, --data says where they are."""
    kinds: dict[str, dict[str, set[str]]] = {}
    for command in app.registered_commands:
        assert command.callback is not None
        for name, parameter in inspect.signature(command.callback).parameters.items():
            kind, option = get_args(parameter.annotation)
            plain = str(next(part for part in (*get_args(kind), kind) if part is not NoneType))
            flags = [] if isinstance(option, ArgumentInfo) else option.param_decls or [f"--{name.replace('_', '-')}"]
            for flag in flags:
                if flag.startswith("--"):
                    kinds.setdefault(flag.partition("/")[0], {}).setdefault(plain, set()).add(command.callback.__name__)
    assert "--images" not in kinds
    assert {flag for flag, found in kinds.items() if len(found) > 1} <= {
        *("--batch", "--gflops", "--img-size", "--keep", "--runtime"),  # several with commas, where several are made
        *("--method", "--measured"),  # one, or several to compare
    }
    verbs = {name for found in kinds["--device"].values() for name in found}
    assert verbs == set(VERBS) - {"plan", "push", "info", "demo"}


def test_help_shows_choices_and_defaults_of_the_configuration() -> None:
    said = " ".join(pmvit_here("finetune", "-h").stdout.split())
    for field in fields(FinetuneConfig):
        if field.name != "cpu":
            assert f"--{field.name.replace('_', '-')}" in said, field.name
    assert "--scheduler <cosine|tanh|poly|step|multistep>" in said
    assert "[default: (0.35 1.0)]" in said
    assert "[default: (labels)]" in said
    assert "[default: (3e-05)]" in " ".join(pmvit_here("calibrate", "-h").stdout.split())
    assert pmvit_here("plan", "x", "--scope", "everywhere", "--keep", 0.5, "-o", "y").returncode == 2


def test_a_device_that_cannot_be_used_is_refused_with_a_reason(tmp_path: Path) -> None:
    for verb in ("benchmark", "report", "serve"):
        result = pmvit_here(verb, "x", "--device", "cuda:77")
        assert result.returncode == 1
        assert "--device: expected one that PyTorch can use here; got cuda:77" in result.stderr
    written = pmvit_here("export", "x", "-o", "y", "--device", "cuda")
    assert (
        "--device: expected cpu, got cuda: what is written is compared there, by ONNX Runtime's CPU" in written.stderr
    )
    model = demo_model()
    pmvit.save(pmvit.compress(model, small_plan(model)), tmp_path / "small")
    timed = pmvit_here("benchmark", tmp_path / "small", "--device", "meta", "--runtime", "eager,onnxruntime")
    assert "device: expected cpu for onnx, which run there (ONNX Runtime by its CPU provider); got meta" in timed.stderr


@pytest.mark.parametrize("is_screen", [True, False])
def test_a_table_loses_no_title_and_no_digit(monkeypatch: pytest.MonkeyPatch, is_screen: bool) -> None:
    """A narrow screen shows it in parts, each with the names of its rows; a file has every row on one line."""
    titles = Benchmark([]).columns()
    numbers = [*["123.4"] * 4, *["1.53x [1.50, 1.56]"] * 2, "0.95", "63"]
    rows = [["eager", "16", "compressed", *numbers], ["onnx", "16", "original-optimized", *numbers]]
    rows[1][7] = f"does not run: {'many words ' * 12}"
    monkeypatch.setenv("COLUMNS", "80")
    if is_screen:
        monkeypatch.setenv("FORCE_COLOR", "1")
    with redirect_stdout(io.StringIO()) as said:
        Screen().table(titles, rows, left=("variant",))
    text = re.sub(r"\x1b\[[0-9;]*m", "", said.getvalue())
    lines = text.splitlines()
    words = {word for cells in (titles, *rows) for cell in cells for word in cell.split()}
    assert set(text.split()) - words <= {"─" * len(line) for line in lines}
    assert words <= set(text.split())
    numbered = [line for line in lines if line.startswith("eager")]
    assert "  ".join(line.split("compressed")[1] for line in numbered).split() == " ".join(numbers).split()
    if is_screen:
        assert max(map(len, lines)) <= 80
        assert sum("variant" in line for line in lines) == len(numbered) > 1
    else:
        assert len(lines) == 2 + len(rows)


def test_a_sentence_in_a_file_stays_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    sentence = "many words " * 12
    with redirect_stdout(io.StringIO()) as said:
        screen = Screen()
        screen.print(sentence)
        screen.warn(sentence)
    assert said.getvalue().splitlines() == [sentence, sentence]


def test_saved_models_are_completed_beside_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deit_small").mkdir()
    (tmp_path / "deit.safetensors").touch()
    (tmp_path / "deit.txt").touch()
    offered = completion.complete_model("deit")
    assert {"deit_small", "deit.safetensors", "deit_tiny_patch16_224"} <= set(offered)
    assert "deit.txt" not in offered
    assert completion.complete_model("segmenter:deit_tiny_p") == ["segmenter:deit_tiny_patch16_224"]


def test_every_verb_knows_json() -> None:
    """All but `serve`, which does not end."""
    for command in app.registered_commands:
        assert command.callback is not None
        if command.callback.__name__ != "serve":
            assert "as_json" in inspect.signature(command.callback).parameters, command.callback.__name__


def test_json_is_all_there_is_on_standard_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = demo_model()
    pmvit.save(model, tmp_path / "model")
    pmvit.measure(model, [], method="scored", scorer="random").save(tmp_path / "scores.json")
    count = pmvit.flops

    def noisy(network: Any) -> Any:
        print("a library that talks")
        return count(network)

    monkeypatch.setattr(pmvit, "flops", noisy)
    plan = pmvit_here("plan", tmp_path / "scores.json", "--keep", 0.6, "-o", tmp_path / "plan.json", "--json")
    made = pmvit_here("compress", tmp_path / "model", "--plan", tmp_path / "plan.json", "-o", tmp_path / "x", "--json")
    tome = pmvit_here("compress", tmp_path / "model", "--method", "tome", "--r", 9, "-o", tmp_path / "y", "--json")
    info = pmvit_here("info", tmp_path / "x", "--json")
    documents = [json.loads(result.stdout) for result in (plan, made, tome, info)]
    assert documents[0]["blocks"] == documents[1]["blocks"] == documents[3]["blocks"]
    assert documents[1]["compressed"] == documents[3]["compressed"]
    assert documents[2]["method"]["name"] == "tome"
    assert "a library that talks" in made.stderr
    wrong = pmvit_here("info", tmp_path / "nothing", "--json")
    assert (wrong.returncode, wrong.stdout) == (1, "")


def verb(body: str, tmp_path: Path) -> "subprocess.Popen[str]":
    """The command line with one more verb, which does this and would then take a minute."""
    code = (
        "import time, pmvit.cli as cli; from pathlib import Path; from pmvit.cli.screen import console, print_json\n"
        "from pmvit.files import write_atomically\n"
        f"def wait() -> None:\n    {body}\n    time.sleep(60)\n"
        "cli.app.command()(wait)\ncli.main()"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.Popen(
        [sys.executable, "-c", code, "wait"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=tmp_path,
        preexec_fn=listen_to_interrupts,
    )


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped_commands_leave_nothing_half_written(tmp_path: Path, sent: signal.Signals, code: int) -> None:
    process = verb(
        "write_atomically(Path('out'), lambda new: (new.write_text('half'), print('on', flush=True), time.sleep(60)))",
        tmp_path,
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(sent)
    said = process.communicate(timeout=60)[1]
    assert (process.returncode, said) == (code, "")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("body", ["console.table(['a'], [['1']] * 3)", "print_json([1, 2])"])
def test_a_closed_pipe_is_silent(tmp_path: Path, body: str) -> None:
    process = verb(body, tmp_path)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    said = process.stderr.read()
    assert (process.wait(timeout=60), said) == (141, "")


def test_numbers_that_are_none_are_null(capsys: pytest.CaptureFixture[str]) -> None:
    from pmvit.cli.screen import print_json

    print_json({"a": float("nan"), "b": [float("inf"), 1.5], "c": Path("x")})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [None, 1.5], "c": "x"}


def test_wrong_usage_is_told_from_what_does_not_fit() -> None:
    assert pmvit_here("compress").returncode == 2
    assert pmvit_here("shrink").returncode == 2
    assert pmvit_here("benchmark", "x", "--rounds", "1").returncode == 2
    assert pmvit_here("info", "nothing").returncode == 1
