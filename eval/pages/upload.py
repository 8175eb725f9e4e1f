"""Upload of a publication to the Hub as one commit, with one-line errors."""

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError
from huggingface_hub.errors import HTTPError as NetworkError  # type: ignore[attr-defined] # of its HTTP client

from eval.pages.publication import Publication, collect
from eval.records.result_folders import folders_of, newest_results
from heads.core.errors import UserError, first_line
from heads.saved import CONFIG, WEIGHTS

RIGHTS = ("license", "license_name", "license_link")
"""The license keys of a model card on the Hub."""


def publish(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="draftsmith-") as made:
        return upload_or_show(options, Path(made))


def upload_or_show(options: argparse.Namespace, made: Path) -> int:
    """Collect a publication, with its files that are made for it in the folder `made`, and upload or show it."""
    offline = options.license or options.dry_run
    publication = collect(
        options.run,
        options.repo_id,
        results=options.results,
        base_model=options.base_model,
        rights=(lambda base: {"license": options.license} if options.license else {}) if offline else hub_rights,
        unmeasured=options.unmeasured,
        unserved=options.unserved,
        gguf=made if options.gguf else None,
    )
    place = publication.measurement
    for name, data in publication.files.items():
        print(f"{len(data) if isinstance(data, bytes) else data.stat().st_size:>12,} bytes  {name}")
    base = publication.base_model or "a local model, which is not named; --base-model OWNER/NAME names it"
    print(f"base model: {base}")
    searched = "a dry run does not look up the target's" if options.dry_run else "the target's was not found"
    print(f"license: {publication.license or f'none, as {searched}; --license NAME states it'}")
    print(f"figures: {place or 'none'}")
    if place and (newest := newest_results(folders_of(place))) and newest[0] != place:
        print(f"a newer measurement is not published: {newest[0]}; --results {newest[0]} takes it instead")
    if options.dry_run:
        print(f"\n{publication.card}", end="")
        return 0
    token = get_token()
    if not token:
        raise UserError("no token for the Hub; log in with `hf auth login`, set HF_TOKEN, or look with --dry-run")
    with one_line_errors(options.repo_id, token):
        url = upload(HfApi(token=token), publication, options)
    print(f"published: {url}")
    return 0


def hub_rights(base: str) -> dict[str, str]:
    """Return the license keys of a model on the Hub. Empty without a token, or if the model cannot be reached."""
    token = get_token()
    if not base or not token:
        return {}
    try:
        data = HfApi(token=token).model_info(base).card_data
    except (HfHubHTTPError, NetworkError, OSError):
        return {}
    return {key: value for key in RIGHTS if data is not None and isinstance(value := data.get(key), str)}


def upload(api: HfApi, publication: Publication, options: argparse.Namespace) -> str:
    repo_id = options.repo_id
    branch = options.revision
    check_place(api, repo_id, branch, private=options.private)
    api.create_repo(repo_id, private=options.private or None, exist_ok=True)
    if branch:
        api.create_branch(repo_id, branch=branch, exist_ok=True)
    operations = [
        CommitOperationAdd(path_in_repo=name, path_or_fileobj=data) for name, data in publication.files.items()
    ]
    message = f"A draft head ({publication.kind}) with its card"
    return str(api.create_commit(repo_id, operations, commit_message=message, revision=branch).commit_url)


def check_place(api: HfApi, repo_id: str, branch: str | None, *, private: bool) -> None:
    """Refuse a repository that holds something other than a head, or a public one if `private` is set."""
    try:
        info = api.model_info(repo_id)
    except RepositoryNotFoundError:
        return
    if private and not info.private:
        raise UserError(f"{repo_id}: is public; make it private on the Hub, or leave --private out")
    at = branch if branch and api.revision_exists(repo_id, branch) else None
    present = set(api.list_repo_files(repo_id, revision=at))
    if CONFIG in present:
        is_head = b'"draftsmith"' in Path(api.hf_hub_download(repo_id, CONFIG, revision=at)).read_bytes()
    else:
        is_head = not present & set(WEIGHTS)
    if not is_head:
        raise UserError(f"{repo_id}: holds another model, whose files would be replaced; name another repository")


@contextmanager
def one_line_errors(repo_id: str, token: str) -> Iterator[None]:
    """Turn an error of the Hub or the network into one line, which never contains the token."""
    try:
        yield
    except OfflineModeIsEnabled:
        raise UserError(
            "HF_HUB_OFFLINE is set, and publishing needs the Hub; unset it, or look with --dry-run"
        ) from None
    except HfHubHTTPError as error:
        status = error.response.status_code
        reason = first_line(error).replace(token, "(the token)")
        match status:
            case 401:
                text = "the Hub does not take the token; log in anew with `hf auth login`"
            case 403:
                text = f"the token may not write there ({reason}); name a repository of yours or take a token that may"
            case _:
                text = f"the Hub refused ({reason})"
        raise UserError(f"{repo_id}: {text}") from None
    except (NetworkError, OSError) as error:
        reason = first_line(error).replace(token, "(the token)")
        raise UserError(f"{repo_id}: the Hub cannot be reached ({reason}); try again, or look with --dry-run") from None
