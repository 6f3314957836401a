"""What the Hub says about a commit: sizes and hashes of its files.

The one module that uses the network, and only when it is asked to: one question, with repository and commit.
`HF_ENDPOINT`, `HF_HUB_OFFLINE` and the stored token work as everywhere, and so does the client's telemetry.

Source: huggingface_hub 2.4, ``HfApi.model_info(files_metadata=True)``.
"""

from __future__ import annotations

from typing import Any

from dsv4convert.errors import EnvironmentFault, Refused, finding
from dsv4convert.files import printable
from dsv4convert.validate.hashlists import Digest, HashList, digest_of, safe_name

_SECONDS = 30.0


def hub_list(repo: str, commit: str) -> HashList:
    """Ask the Hub for the files of a commit.

    Args:
        repo: ``OWNER/NAME``.
        commit: Commit hash, or any revision.

    Raises:
        Refused: ``online.unknown-revision``.
        EnvironmentFault: ``online.offline``; the Hub may not or cannot be asked.
    """
    if repo == "REPO" or commit == "COMMIT":
        problem = "the repository or the commit of this download is not known"
        raise Refused(finding("online.unknown-revision", f"{repo}@{commit}", problem))
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    api = HfApi()
    where = f"{printable(repo)}@{printable(commit)[:12]}"
    try:
        info = api.model_info(repo, revision=commit, files_metadata=True, timeout=_SECONDS)
    except OfflineModeIsEnabled:
        problem = "`HF_HUB_OFFLINE` is set, and `--online` needs the network"
        raise EnvironmentFault(finding("online.offline", where, problem)) from None
    except GatedRepoError:
        problem = f"{api.endpoint} asks for a login or an accepted license"
        hint = "accept the license on the repository page and run `hf auth login`"
        raise EnvironmentFault(finding("online.offline", where, problem, hint=hint)) from None
    except (RevisionNotFoundError, RepositoryNotFoundError) as error:
        what = "commit" if isinstance(error, RevisionNotFoundError) else "repository"
        problem = f"{api.endpoint} has no such {what}, or it is private"
        raise Refused(finding("online.unknown-revision", where, problem)) from None
    except HFValidationError:
        problem = "is not the name of a repository"
        raise Refused(finding("online.unknown-revision", where, problem, expected="OWNER/NAME")) from None
    except Exception as error:  # Every version of the client has its own tree of network errors.
        text = str(error).split("\n")[0] or type(error).__name__
        problem = f"{api.endpoint} gave no usable answer: {printable(text, 160)}"
        raise EnvironmentFault(finding("online.offline", where, problem)) from None
    files = {}
    for sibling in info.siblings or ():
        name, digest = safe_name(sibling.rfilename), _digest(sibling)
        if name and digest:
            files[name] = digest
    return HashList(f"the Hub at {api.endpoint}", files, repo, info.sha or commit)


def _digest(sibling: Any) -> Digest | None:
    """Return SHA-256 of a large file, the git hash of a small one."""
    size = sibling.size if type(sibling.size) is int else None
    large = sibling.lfs.sha256 if sibling.lfs else None
    value = large or sibling.blob_id
    return digest_of(value, size) if isinstance(value, str) else None
