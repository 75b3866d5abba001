"""The other methods on the command line: `compress --method`."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pmvit.cli.common import PLANNERS, block_numbers, console, pairs, print_costs, print_json
from pmvit.cli.options import MERGE_COST_OPTIONS, PLAN_OPTIONS, SCORE_OPTIONS, given
from pmvit.errors import PmvitError

if TYPE_CHECKING:
    from torch import nn

    from pmvit.card import CardDetails
    from pmvit.methods import Method

SHARED = {"method", "keep", "gflops", "skip"}  # options of a plan that a method may have, too


def by_method(
    model: "nn.Module",
    output: Path,
    options: dict[str, Any],
    source: dict[str, Any],
    arguments: dict[str, Any],
    card: "CardDetails",
    images: Any = None,
    *,
    as_json: bool,
) -> None:
    """Compress a model by another method, which may need images, and save it."""
    import pmvit
    from pmvit.compression import record_source
    from pmvit.saving import check_output

    planning = {name: option for name, option in PLAN_OPTIONS.items() if name not in SHARED}
    if unused := given(options, {**SCORE_OPTIONS, **MERGE_COST_OPTIONS, **planning}):
        raise PmvitError(f"{', '.join(unused)}: for Prune and Merge alone; got it beside --method {options['method']}")
    check_output(output)
    method = chosen_method(model, options, images)
    small = pmvit.compress(model, method)
    record_source(small, **source)
    pmvit.save(small, output, arguments=arguments, card=card)
    before, after = pmvit.flops(model), pmvit.flops(small)
    if as_json:
        costs = {"original": asdict(before), "compressed": asdict(after)}
        print_json({"model": output, "method": method.describe(), **costs})
        return
    print_method(method, before, after)
    console.print(f"compressed model: {output}")


def chosen_method(model: "nn.Module", options: dict[str, Any], images: Any = None) -> "Method":
    """The method that was asked for, with its options; by a budget if there is one."""
    from pmvit.methods import METHODS, make_method, method_called
    from pmvit.methods.budget import method_for

    name = options["method"]
    if name not in METHODS:
        raise PmvitError(f"--method: expected paper, {', '.join([*filter(None, PLANNERS), *METHODS])}; got {name}")
    wanted: dict[str, Any] = pairs("--method-arg", options["method_arg"])
    wanted = {key: tuple(value) if isinstance(value, list) else value for key, value in wanted.items()}
    if options["keep"] is not None:
        wanted["keep"] = options["keep"]
    if options["skip"] is not None:
        wanted["skip"] = block_numbers(options["skip"])
    if options["r"] is not None:
        wanted["r"] = _numbers(options["r"])
    if options["gflops"] is None:
        method = make_method(name, **wanted)
        return method if images is None else method.fit(model, images)
    return method_for(model, method_called(name), options["gflops"], data=images, **wanted)


def _numbers(text: str) -> int | tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdigit() for part in parts):
        raise PmvitError(f"--r: expected a number of tokens, or one for each block as in 9,9,8; got {text!r}")
    return int(text) if len(parts) == 1 else tuple(int(part) for part in parts)


def print_method(method: "Method", before: Any, after: Any) -> None:
    """What was done, and what it costs."""
    said = ", ".join(f"{name} {value}" for name, value in method.describe()["options"].items() if value is not None)
    console.print(f"{method.title}: {said if len(said) < 200 else said[:199] + '…'}")
    print_costs(before, after)
    if method.needs_training:
        console.print("It has weights of its own, which are random: fine-tune it before you use it.", style="yellow")
