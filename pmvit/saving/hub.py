"""Saved models on the Hugging Face Hub: `hf-hub:owner/name@revision`, of which only what pmvit writes is fetched."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

from pmvit.errors import PmvitError, first_line
from pmvit.files import MOST_TEXT, parse_json, read_text
from pmvit.hosts.making import fetching
from pmvit.saving.commands import versions
from pmvit.saving.parts import CONFIG_FILE, FORMAT, MODEL_FILE, parse_config

PREFIX = "hf-hub:"
MOST_BYTES = 32 * 2**30  # of weights
SECONDS = 30.0  # until the hub is taken not to answer


class HubPlace(NamedTuple):
    """A repository of the hub, at a branch, a tag or a commit if one was named."""

    repo: str
    revision: str | None

    @classmethod
    def of(cls, name: str | Path) -> "HubPlace":
        """What `hf-hub:owner/name@revision` says; `PmvitError` if it is something else."""
        repo, at, revision = Path(name).as_posix().removeprefix(PREFIX).partition("@")
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo) or (at and not revision):
            raise PmvitError(f"expected owner/name or owner/name@revision of a model on the hub; got {str(name)!r}")
        return cls(repo, revision or None)

    @property
    def name(self) -> str:
        """As `load` takes it."""
        return f"{PREFIX}{self.repo}" + (f"@{self.revision}" if self.revision else "")


def is_hub_name(path: str | Path) -> bool:
    """Whether what stands for a saved model is its place on the hub."""
    return Path(path).as_posix().startswith(PREFIX)


def hub_api() -> HfApi:
    """The hub, asked in the name of pmvit."""
    return HfApi(library_name="pmvit", library_version=versions().get("pmvit"))


def local_path(path: str | Path) -> Path:
    """Where a saved model is on this machine; one on the hub is fetched, unless it has been fetched before.

    Raises:
        PmvitError: If it is on the hub and is not there, may not be read, or is not a model that pmvit saved.
    """
    if not is_hub_name(path):
        return Path(path)
    folder = fetch(path, "fetch it where there is a network, or pass a folder that pmvit saved")
    if folder is None:
        raise PmvitError(
            f"expected a model that pmvit saved at {path}; its {CONFIG_FILE} is not pmvit's: timm's models are opened "
            "by `pmvit.loading.create_model` and by the verbs that take a model's name, as `pmvit compress`"
        )
    return folder


def fetch(name: str | Path, instead: str) -> Path | None:
    """The folder of a model on the hub that pmvit saved; `None` if the repository holds another library's.

    Its `config.json` decides: what says that it is a `pmvit-model` is ours. Of such a repository, the files that pmvit
    writes and this one vouches for are fetched and no others, after their sizes were asked for.

    Args:
        name: `hf-hub:owner/name`, and `@revision`: a branch, a tag or a commit.
        instead: What to do where there is no network and it was not fetched before, to end the error with.
    """
    place = HubPlace.of(name)
    with asking(place, "fetched"), fetching(place.name, instead):
        api, is_offline = hub_api(), constants.HF_HUB_OFFLINE
        sizes, commit = (None, None) if is_offline else _listed(api, place)

        def get(file: str, revision: str | None) -> Path:
            if sizes is not None:
                _check_size(file, sizes, place)
            return Path(api.hf_hub_download(place.repo, file, revision=revision, local_files_only=is_offline))

        if sizes is not None and CONFIG_FILE not in sizes:
            return None
        config = get(CONFIG_FILE, place.revision)  # by its name: it is then found by that without a network, too
        folder = config.parent
        if commit not in (None, folder.name):
            raise PmvitError(f"{place.name} has been changed while it was read: try again")
        if not is_ours(config):
            return None
        for part in parse_config(read_text(config, "the configuration of a model"), place.name)["sha256"]:
            get(part, folder.name)
    return folder


def is_ours(config: Path) -> bool:
    """Whether a `config.json` says that it belongs to a model that pmvit saved."""
    try:
        data = parse_json(read_text(config, "a configuration"), str(config))
    except PmvitError:
        return False
    return isinstance(data, dict) and data.get("format") == FORMAT


def _listed(api: HfApi, place: HubPlace) -> tuple[dict[str, int | None], str | None]:
    """The size of each file of a repository, and the commit that they are of."""
    info = api.model_info(place.repo, revision=place.revision, files_metadata=True, timeout=SECONDS)
    return {file.rfilename: file.size for file in info.siblings or ()}, info.sha


def _check_size(file: str, sizes: dict[str, int | None], place: HubPlace) -> None:
    if file not in sizes:
        raise PmvitError(f"expected {file} in {place.name}; it is missing: push the model again")
    size, most = sizes[file], MOST_BYTES if file == MODEL_FILE else MOST_TEXT
    if size is None or size > most:
        told = "a file of unknown size" if size is None else f"{size:,}"
        raise PmvitError(
            f"expected {file} of at most {most:,} bytes in {place.name}, got {told}: it is not fetched. If it is meant "
            f"to be, `hf download {place.repo}` and pass the folder"
        )


@contextmanager
def asking(place: HubPlace, what: str) -> Iterator[None]:
    """Say in one line why the hub refused something, and what to do about it."""
    try:
        yield
    except PmvitError:
        raise
    except HfHubHTTPError as error:
        raise PmvitError(f"{place.name} cannot be {what}: {_refusal(error, place)}") from None
    except Exception as error:  # of whatever library it asks with
        raise PmvitError(
            f"{place.name} cannot be {what} ({first_line(error)}): try again; files that are there already stay"
        ) from None


def _refusal(error: HfHubHTTPError, place: HubPlace) -> str:
    status: Any = getattr(error.response, "status_code", None)
    if isinstance(error, GatedRepoError):
        return f"its owner chooses who may have it: ask on {constants.ENDPOINT}/{place.repo}, then `hf auth login`"
    if isinstance(error, RevisionNotFoundError):
        return f"there is no revision {place.revision!r} of it"
    if status == 401 and error.server_message == "Invalid credentials in Authorization header":
        return "the hub does not know your token: log in again with `hf auth login`"
    if isinstance(error, RepositoryNotFoundError) or status in (401, 404):
        return "there is no such model, or it is not for everybody: check its name, or log in with `hf auth login`"
    if status == 403:
        return "your token does not allow it: log in with one that may write there (`hf auth login`)"
    return first_line(error)
