"""A hub on this machine, for the client in this process."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import close_session, constants

from tests.hub_server import TOKEN, Hub, running_hub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub where we are `me`, logged in, with an empty cache."""
    with running_hub() as made:
        monkeypatch.setattr(constants, "ENDPOINT", made.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", made.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 2**16)
        for name, value in {"HF_TOKEN": TOKEN, "NO_PROXY": "127.0.0.1"}.items():
            monkeypatch.setenv(name, value)
        close_session()
        yield made
        close_session()
