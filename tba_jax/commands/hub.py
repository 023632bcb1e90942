# SPDX-License-Identifier: Apache-2.0
"""Upload of a folder to a model repository of the Hugging Face hub.

Every failure is a ValueError of one line that says what to do; the folder stays unchanged.
"""

from pathlib import Path
from typing import cast


def check_push(repo: str) -> None:
    """Check the repository name and the access before the command computes anything.

    Args:
        repo: NAME or OWNER/NAME.

    Raises:
        ValueError: the name is not valid, the hub is disabled, or there is no token.
    """
    from huggingface_hub import constants, get_token
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ValueError(f"--push={repo}: must be OWNER/NAME of the hub; {error}") from error
    if constants.HF_HUB_OFFLINE:
        raise ValueError(f"--push={repo}: HF_HUB_OFFLINE is set. Unset it, or leave --push out")
    if get_token() is None:
        raise ValueError(
            f"--push={repo}: there is no Hugging Face token. Run `hf auth login`, or set HF_TOKEN "
            "to a token with write access"
        )


def push(folder: Path, repo: str, *, is_public: bool = False, step: int | None = None) -> str:
    """Upload a folder as one commit; create the repository if it does not exist.

    Args:
        is_public: visibility of a new repository; an existing repository keeps its visibility.
        step: step of the policy, for the commit message. None: the commit message has no step, and
            an error contains the command that uploads `folder` again.

    Returns:
        The address of the repository.

    Raises:
        ValueError: see `check_push`; or there is no write access, or the hub is unreachable.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    # Base class of both the client's connection failures and the hub's error responses; which HTTP
    # library defines it depends on the version of huggingface_hub.
    http_error = cast("type[Exception]", HfHubHTTPError.__bases__[0])

    check_push(repo)
    api = HfApi(library_name="tba_jax")
    message, again = "Policy of a tba_jax run", ""
    if step is None:
        again = f". The export is in {folder}. Upload it with `hf upload {repo} {folder}`"
    else:
        message = f"Policy at step {step} of a tba_jax run"
    try:
        address = api.create_repo(repo, private=not is_public, exist_ok=True)
        api.upload_folder(repo_id=address.repo_id, folder_path=folder, commit_message=message)
    except HfHubHTTPError as error:
        status = error.response.status_code
        said = (error.server_message or str(error).splitlines()[0]).strip()
        if status in (401, 403, 404):
            raise ValueError(
                f"--push={repo}: the hub refused ({status}: {said}). Use a token with write access "
                f"(`hf auth whoami` names its user){again}"
            ) from error
        raise ValueError(f"--push={repo}: the hub answered {status}: {said}{again}") from error
    except (http_error, OSError) as error:
        raise ValueError(
            f"--push={repo}: {api.endpoint} is unreachable ({error}){again}"
        ) from error
    return str(address)
