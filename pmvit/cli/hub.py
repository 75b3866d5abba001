"""`push`: bring a saved model to the Hugging Face Hub."""

from pathlib import Path
from typing import Annotated, Any

import typer

from pmvit.cli import options as opt
from pmvit.cli.screen import console


@opt.verb
def push(
    model: opt.Saved,
    repo: Annotated[str, typer.Argument(help="owner/name on the Hugging Face Hub, or owner/name@branch.")],
    private: Annotated[
        bool | None,
        typer.Option("--private/--public", help="Who may see a new repository; as its owner has set it if left out."),
    ] = None,
    message: Annotated[str | None, typer.Option("--message", "-m", help="Of the commit.")] = None,
    evaluation: Annotated[
        Path | None, typer.Option(help="What `pmvit evaluate --json` printed, for the model card.")
    ] = None,
    dataset: Annotated[str | None, typer.Option(help="What was evaluated on, as the hub names it.")] = None,
    base_model: Annotated[
        str | None, typer.Option(help="The original on the hub, for the card; what it was opened from if left out.")
    ] = None,
    license: Annotated[str | None, typer.Option(help="Of the original, for the card.")] = None,  # noqa: A002
) -> dict[str, Any]:
    """Save a model on the Hugging Face Hub, where hf-hub:owner/name names it to pmvit; `hf auth login` comes before.

    Weights, configuration, plan and the model card go there: read the card before, it holds the command that was typed.
    """
    import pmvit
    from pmvit.files import read_json
    from pmvit.saving.card import CardDetails, rows_of
    from pmvit.saving.hub import HubPlace

    if evaluation is None:
        opt.refuse("expected beside --evaluation alone", {"dataset": dataset})
    measured = {} if evaluation is None else rows_of(read_json(evaluation, "an evaluation"))
    details = CardDetails(measured, base_model=base_model, license=license, dataset=dataset)
    commit = pmvit.push_to_hub(
        model, repo, private=private, message=message, card=None if details == CardDetails() else details
    )
    name = HubPlace.of(repo).name
    console.print(f"pushed: {commit.commit_url}", soft_wrap=True)
    console.print(f"it is opened by {name}")
    return {"model": name, "commit": commit.oid, "url": commit.commit_url}
