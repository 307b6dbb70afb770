"""Models of the Hugging Face hub, by id `org/name`; or one GGUF file of such a repository, `org/name/file.gguf`."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from kvarn.core.errors import FetchError, ModelError
from kvarn.core.files import ModelFiles
from kvarn.hub.local import INDEX, open_local
from kvarn.hub.pip import disk_full
from kvarn.hub.progress import Progress

T = TypeVar("T")
HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
HUB_FILE = re.compile(r"^([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)/(.+\.gguf)$")
WANTED = ("*.json", "*.jinja", "tokenizer.model", "*.safetensors")
CONFIG_FILES = ("config.json", INDEX, "generation_config.json")


def cached(name: str) -> ModelFiles | None:
    """The model `name` from huggingface_hub's own cache, if it is there whole. No network."""
    from huggingface_hub import hf_hub_download  # noqa: PLC0415  (half a second to import)
    from huggingface_hub.errors import LocalEntryNotFoundError  # noqa: PLC0415

    try:
        if parts := HUB_FILE.match(name):
            return open_local(name, Path(hf_hub_download(parts[1], parts[2], local_files_only=True)))
        return open_local(name, Path(_snapshot(name, local_files_only=True)))
    except (LocalEntryNotFoundError, ModelError):
        return None


def fetch(name: str, progress: Progress) -> ModelFiles:
    """Fetch config, tokenizer and safetensors of a hub id, or one GGUF file of it. huggingface_hub resumes broken
    files, verifies them and shows its own progress bars. Raises FetchError, ModelError."""
    from huggingface_hub import hf_hub_download  # noqa: PLC0415

    if parts := HUB_FILE.match(name):
        return open_local(name, Path(_explained(name, lambda: hf_hub_download(parts[1], parts[2]))))
    progress(name, 0, 0)
    files = _explained(name, lambda: _listing(name))
    _require_loadable(name, files)
    path = _explained(name, lambda: _snapshot(name))
    return open_local(name, Path(path))


def fetch_config(name: str) -> Path:
    """Directory with the config.json of a hub id, and its safetensors index if it has one; no weights. Uses the cached
    copy when there is one. Raises FetchError."""
    from huggingface_hub import snapshot_download, try_to_load_from_cache  # noqa: PLC0415

    here = try_to_load_from_cache(name, "config.json")
    if isinstance(here, str):
        return Path(here).parent
    path = Path(_explained(name, lambda: snapshot_download(name, allow_patterns=list(CONFIG_FILES))))
    if not (path / "config.json").is_file():
        raise ModelError(f"{name} on the Hugging Face hub has no config.json")
    return path


def _snapshot(name: str, local_files_only: bool = False) -> str:
    """Directory with the wanted files of the top level; copies in other formats lie in subdirectories."""
    from huggingface_hub import snapshot_download  # noqa: PLC0415

    return snapshot_download(
        name, local_files_only=local_files_only, allow_patterns=list(WANTED), ignore_patterns=["*/*"]
    )


def _listing(name: str) -> list[str]:
    from huggingface_hub import HfApi  # noqa: PLC0415

    return HfApi().list_repo_files(name)


def _require_loadable(name: str, files: Sequence[str]) -> None:
    if "config.json" in files and any(file.endswith(".safetensors") for file in files):
        return
    ggufs = [file for file in files if file.endswith(".gguf")]
    lacks = "config.json and safetensors" if "config.json" not in files else "safetensors"
    raise ModelError(
        f"{name} on the Hugging Face hub has no {lacks}" + (f", but {len(ggufs)} GGUF files" if ggufs else ""),
        fixes=tuple(f"{name}/{file}" for file in ggufs[:8]),
    )


def _explained(name: str, action: Callable[[], T]) -> T:
    """Run `action`; its many ways to fail become one line each."""
    from huggingface_hub import constants, errors  # noqa: PLC0415

    try:
        return action()
    except errors.GatedRepoError as error:
        raise FetchError(f"{name} is gated: its owner must let you in", fixes=("hf auth login",)) from error
    except (errors.RepositoryNotFoundError, errors.EntryNotFoundError, errors.RevisionNotFoundError) as error:
        if isinstance(error, errors.LocalEntryNotFoundError):
            raise _no_network(name) from error
        raise FetchError(
            f"{name} was not found on the Hugging Face hub",
            fixes=("check the spelling", "hf auth login if it is private"),
        ) from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "no answer"
        raise FetchError(f"the Hugging Face hub answered {status} for {name}") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise disk_full(Path(constants.HF_HUB_CACHE)) from error
        raise _no_network(name) from error
    except Exception as error:
        # The HTTP library below huggingface_hub has changed more than once and is not Kvarn's to import.
        if type(error).__module__.startswith(("httpx", "httpcore", "requests", "urllib3")):
            raise _no_network(name) from error
        raise


def _no_network(name: str) -> FetchError:
    return FetchError(
        f"no network: the Hugging Face hub could not be reached for {name}, and it is not in the local cache",
        fixes=("check the connection", "give a local directory or GGUF file"),
    )
