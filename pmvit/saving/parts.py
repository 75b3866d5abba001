"""What a saved model consists of: its configuration, and the files that this vouches for with their checksums."""

from pathlib import Path
from typing import Any

from pmvit.errors import PmvitError
from pmvit.files import check_fields, check_regular, parse_document, read_text
from pmvit.tensors import read_texts

FORMAT, VERSION = "pmvit-model", 2
MODEL_FILE, CONFIG_FILE = "model.safetensors", "config.json"
RECIPES = {  # by kind: what makes it of its JSON, a name for errors and its tensors
    "plan": "pmvit.planning:Plan.from_json",
    "adaptive": "pmvit.planning.adaptive:AdaptivePlan.from_json",
    "method": "pmvit.methods:Method.from_json",
}
# What transformers reads of any `config.json`: a type that it does not know, and weights that are not there. Else its
# classes would take what fits of a compressed model and make up the rest.
FOR_TRANSFORMERS = {"model_type": "pmvit", "transformers_weights": "open-it-with-pmvit.load.safetensors"}


def parse_config(text: str, where: str) -> dict[str, Any]:
    """The configuration of a saved model; `PmvitError` if it is something else."""
    config = parse_document(text, FORMAT, VERSION, where)
    fields = ["format", "version", "pmvit", "model", "dtype", "sha256"]
    fields += ["family", "learn"] if config["version"] == 1 else ["host", "compression"]
    optional = ("method",) if config["version"] == 1 else ("label_names", *FOR_TRANSFORMERS)
    check_fields(config, fields, where, optional=optional)
    names = (f"{kind}.json" for kind in RECIPES)
    check_fields(config["sha256"], (MODEL_FILE, CONFIG_FILE), f"{where}: sha256", optional=names)
    return config


def open_folder(folder: Path) -> tuple[dict[str, Any], dict[str, str], Path]:
    """Configuration and other documents of a folder, and where its tensors are."""
    place = folder / CONFIG_FILE
    if not place.exists():
        raise PmvitError(f"expected a model saved by pmvit in {folder}, which has no {CONFIG_FILE}")
    config = parse_config(read_text(place, "the configuration of a model"), str(place))
    for name in config["sha256"]:
        check_regular(folder / name)
        if not (folder / name).is_file():
            raise PmvitError(f"expected {name} in {folder}; it is missing: save the model again")
    others = set(config["sha256"]) - {MODEL_FILE, CONFIG_FILE}
    return config, {name: read_text(folder / name, "a part of a model") for name in others}, folder / MODEL_FILE


def open_file(path: Path) -> tuple[dict[str, Any], dict[str, str], Path]:
    """Configuration and other documents of a single file, and where its tensors are."""
    documents = read_texts(path)
    if CONFIG_FILE not in documents:
        raise PmvitError(f"{path} holds weights but no pmvit model: load it as the weights of an architecture instead")
    return parse_config(documents.pop(CONFIG_FILE), f"{path}: config"), documents, path
