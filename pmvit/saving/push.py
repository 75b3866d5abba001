"""Bring a model to the Hugging Face Hub, where `load` finds it again."""

import tempfile
import warnings
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, HfApi
from torch import nn

from pmvit.errors import PmvitError, PmvitWarning
from pmvit.files import MOST_TEXT, read_text, write_text
from pmvit.saving.card import CARD_FILE, MARK, CardDetails, completed
from pmvit.saving.hub import SECONDS, HubPlace, asking, hub_api, is_ours
from pmvit.saving.models import load, save
from pmvit.saving.parts import CONFIG_FILE, MODEL_FILE, RECIPES


def push_to_hub(
    model: nn.Module | str | Path,
    repo: str,
    *,
    private: bool | None = None,
    message: str | None = None,
    arguments: dict[str, Any] | None = None,
    card: CardDetails | None = None,
) -> CommitInfo:
    """Save a model, compressed or not, in a repository of the Hugging Face Hub, which is made if it is not there.

    What goes there is what `save` writes: weights, configuration, plan, and a model card. Paths on this machine, and
    what other commands left in a folder, do not. A text on the hub that pmvit did not write stays.

    Args:
        model: A model, or where `save` wrote one; its model card goes with it.
        repo: `owner/name`, or `owner/name@branch` for a branch, which is made if it is not there.
        private: Whether nobody else may see a new repository; as its owner has set it, if not given.
        message: Of the commit.
        arguments: As `save` takes them, for a model that is not saved yet.
        card: What the card says that cannot be read off the model: how good it is, what it was made of.

    Returns:
        The commit; `commit_url` shows it.

    Raises:
        PmvitError: If the model cannot be saved, the hub refuses it, or another library's model is there.
    """
    place = HubPlace.of(repo)
    with tempfile.TemporaryDirectory() as folder:
        written = _write(model, Path(folder), arguments, card)
        with asking(place, "pushed"):
            api = hub_api()
            api.create_repo(place.repo, private=private, exist_ok=True)
            if place.revision is not None:
                api.create_branch(place.repo, branch=place.revision, exist_ok=True)
            if _keeps_its_card(api, place, private):
                warnings.warn(f"the {CARD_FILE} of {place.name} is not pmvit's and stays", PmvitWarning, stacklevel=2)
                written.remove(CARD_FILE)
            result: CommitInfo = api.upload_folder(
                repo_id=place.repo,
                folder_path=folder,
                revision=place.revision,
                commit_message=message or "Upload a model with pmvit",
                allow_patterns=written,
                delete_patterns=[f"{kind}.json" for kind in RECIPES],  # of the model that was there before
            )
    return result


def _write(
    model: nn.Module | str | Path, folder: Path, arguments: dict[str, Any] | None, card: CardDetails | None
) -> list[str]:
    """Save the model in a folder; the names of the files that make it up."""
    if isinstance(model, nn.Module):
        save(model, folder, arguments=arguments, card=card, portable=True)
    else:
        if arguments is not None:
            raise PmvitError(f"arguments: {model} is saved and says itself what it was made with: leave them out")
        save(load(model), folder, portable=True)
        if (own := Path(model) / CARD_FILE).is_file():
            write_text(folder / CARD_FILE, read_text(own, "a model card"))
        if card is not None:
            write_text(folder / CARD_FILE, completed(read_text(folder / CARD_FILE, "a model card"), card))
    names = [CONFIG_FILE, MODEL_FILE, CARD_FILE, *(f"{kind}.json" for kind in RECIPES)]
    return [name for name in names if (folder / name).is_file()]


def _keeps_its_card(api: HfApi, place: HubPlace, private: bool | None) -> bool:
    """Whether there is a card on the hub that somebody else wrote.

    Raises:
        PmvitError: If the repository is another than the one that was asked for, or holds another library's model.
    """
    info = api.model_info(place.repo, revision=place.revision, files_metadata=True, timeout=SECONDS)
    if private is not None and info.private != private:
        has, wanted = ("private" if each else "public" for each in (info.private, private))
        raise PmvitError(f"{place.name} is there already and is {has}, not {wanted}: change it in its settings")
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}

    def fetched(name: str) -> Path | None:
        if name not in sizes or sizes[name] > MOST_TEXT:
            return None
        return Path(api.hf_hub_download(place.repo, name, revision=info.sha))

    config, text = fetched(CONFIG_FILE), fetched(CARD_FILE)
    if {CONFIG_FILE, MODEL_FILE} & set(sizes) and (config is None or not is_ours(config)):
        raise PmvitError(
            f"expected an empty repository or one with a model of pmvit at {place.name}; another library's is there: "
            "choose another name"
        )
    if CARD_FILE not in sizes:
        return False
    return text is None or MARK not in text.read_text(encoding="utf-8", errors="replace")
