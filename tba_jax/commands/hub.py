# SPDX-License-Identifier: Apache-2.0
"""A folder becomes a model repository of the Hugging Face hub.

It knows the hub's client and nothing of models. Every failure is a ValueError of one line that says
what to do; the folder stays as it is.
"""

from pathlib import Path
from typing import cast


def check_push(repo: str) -> None:
    """Refuse what cannot be pushed before anything is computed.

    Args:
        repo: NAME or OWNER/NAME.

    Raises:
        ValueError: no such name is possible, the hub is switched off, or there is no token.
    """
    from huggingface_hub import constants, get_token
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ValueError(f"--push={repo}: want OWNER/NAME of the hub; {error}") from error
    if constants.HF_HUB_OFFLINE:
        raise ValueError(f"--push={repo}: HF_HUB_OFFLINE is set; unset it, or leave --push out")
    if get_token() is None:
        raise ValueError(
            f"--push={repo}: there is no Hugging Face token; run `hf auth login`, or set HF_TOKEN "
            "to a token that may write"
        )


def push(folder: Path, repo: str, *, is_public: bool = False) -> str:
    """Upload a folder, as one commit; makes the repository where there is none.

    Args:
        folder: what to upload.
        repo: NAME or OWNER/NAME.
        is_public: of a new repository; one that exists keeps what it is.

    Returns:
        The address of the repository.

    Raises:
        ValueError: as `check_push`; the token may not write there; the hub is not reached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    # The client's own failures to connect, by the class that the hub's answers derive from: which
    # HTTP library that is depends on the version of huggingface_hub.
    http_error = cast("type[Exception]", HfHubHTTPError.__bases__[0])

    check_push(repo)
    api = HfApi(library_name="tba_jax")
    again = f"{folder} is written: try again with `hf upload {repo} {folder}`"
    try:
        address = api.create_repo(repo, private=not is_public, exist_ok=True)
        api.upload_folder(
            repo_id=address.repo_id, folder_path=folder, commit_message="Policy of a tba_jax run"
        )
    except HfHubHTTPError as error:
        status = error.response.status_code
        said = (error.server_message or str(error).splitlines()[0]).strip()
        if status in (401, 403, 404):
            raise ValueError(
                f"--push={repo}: the hub refused ({status}: {said}); the token needs the right to "
                f"write there (`hf auth whoami` says whose it is). {again}"
            ) from error
        raise ValueError(f"--push={repo}: the hub answered {status}: {said}. {again}") from error
    except (http_error, OSError) as error:
        raise ValueError(f"--push={repo}: no way to {api.endpoint} ({error}). {again}") from error
    return str(address)
