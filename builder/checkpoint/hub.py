"""A checkpoint's snapshot in the Hugging Face hub cache."""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    RevisionResolutionError,
)

# Whatever HTTP library this version of the hub client is built on.
from huggingface_hub.errors import HTTPError as TransportError  # type: ignore[attr-defined]

from pop_engine.builder.checkpoint.reason import reason
from pop_engine.configs.errors import EngineError, UsageError

_CONFIG_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]
_WEIGHT_FILES = ["*.safetensors"]
_CODE_FILES = ["*.py"]
# Copies of the weights in other layouts, which some repositories keep beside the transformers one.
_OTHER_LAYOUTS = ["*/*", "consolidated*"]


def fetch_snapshot(
    hub_id: str, revision: str | None, *, with_weights: bool, with_code: bool, fix: str
) -> tuple[Path, str | None]:
    """Folder and commit of a hub repository, downloaded where the cache lacks it.

    Raises UsageError where the repository or revision does not exist, is closed, or is neither cached nor
    reachable; `fix` then says how to get it.
    """
    at = f" at revision {revision}" if revision else ""
    patterns = _CONFIG_FILES + _WEIGHT_FILES * with_weights + _CODE_FILES * with_code
    try:
        folder = Path(
            snapshot_download(
                hub_id,
                revision=revision,
                allow_patterns=patterns,
                ignore_patterns=_OTHER_LAYOUTS,
            )
        )
    except GatedRepoError as error:
        raise UsageError(
            f"{hub_id}: access needs the owner's leave; accept its terms on the hub, then `hf auth login`"
        ) from error
    except (RepositoryNotFoundError, RevisionNotFoundError, RevisionResolutionError, HFValidationError) as error:
        raise UsageError(f"{hub_id}{at}: no such repository or revision on the hub; check the name") from error
    except HfHubHTTPError as error:
        raise EngineError(f"{hub_id}{at}: the hub answered with an error ({reason(error)}); try again later") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, ConnectionError, TransportError) as error:
        raise UsageError(
            f"{hub_id}{at}: not in the local hub cache, and the hub cannot be reached; get it with {fix}"
        ) from error
    commit = folder.name if folder.parent.name == "snapshots" else revision
    return folder, commit
