"""Opens the store that a URL names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from cutline.errors import ConfigError
from cutline.objects.folder import FolderStore
from cutline.ports.objects import ObjectStore

_REMOTE_SCHEMES = ("s3", "gs", "az")


def open_store(url: str, options: Mapping[str, str] = {}, *, creates: bool = True) -> ObjectStore:
    """Open the store at ``file:///folder``, ``/folder``, ``memory://name``, ``s3://bucket/prefix``, ``gs://`` or ``az://``.

    This sends nothing to a remote store. ``options`` are for remote stores: ``endpoint``, ``region``,
    ``access_key_id`` and so on, as obstore names them (missing ones come from the standard environment variables), and
    ``request_timeout_s`` and ``retry_for_s``. ``creates``: a folder that is missing is created.
    """
    if "://" not in url:
        return _open_folder(Path(url), options, creates=creates)
    try:
        parts = urlsplit(url)
    except ValueError:  # its message repeats a part of the URL
        raise ConfigError("the URL of an object store cannot be read", next_step="write s3://bucket/prefix") from None
    # A slash in a secret ends what looks like the bucket: then a colon remains in it.
    is_cut = parts.scheme in _REMOTE_SCHEMES and ":" in parts.netloc
    if is_cut or "@" in parts.netloc or parts.query or parts.fragment:
        # The URL may hold a secret, so the message must not repeat it.
        raise ConfigError(
            "the URL of an object store holds more than a place",
            next_step="give credentials as options or in the environment, never in the URL",
            scheme=parts.scheme,
        )
    if parts.scheme == "file":
        return _open_folder(_folder_of(parts), options, creates=creates)
    if parts.scheme != "memory" and parts.scheme not in _REMOTE_SCHEMES:
        raise ConfigError(
            "there is no object store of this kind",
            next_step="use file, memory, s3, gs or az, or a plain path",
            scheme=parts.scheme,
        )
    if not parts.netloc:
        raise ConfigError("the URL of an object store names no bucket", next_step=f"write {parts.scheme}://name")
    return _open_with_obstore(url.rstrip("/"), parts.scheme, options)


def _folder_of(parts: SplitResult) -> Path:
    folder = Path(unquote(parts.path))
    if parts.netloc not in ("", "localhost") or not folder.is_absolute():
        raise ConfigError("a file URL needs an absolute path", next_step="write file:///folder, with three slashes")
    return folder


def _open_folder(folder: Path, options: Mapping[str, str], *, creates: bool) -> ObjectStore:
    _refuse_options(options)
    return FolderStore(folder, creates=creates)


def _open_with_obstore(url: str, scheme: str, options: Mapping[str, str]) -> ObjectStore:
    try:
        from cutline.objects import remote
    except ModuleNotFoundError as missing:
        raise ConfigError(
            "object stores need a package that is not installed", next_step="pip install 'cutline[objectstore]'"
        ) from missing
    if scheme == "memory":
        _refuse_options(options)
        return remote.open_memory(url)
    return remote.open_remote(url, options)


def _refuse_options(options: Mapping[str, str]) -> None:
    if options:
        raise ConfigError("this kind of object store has no options", options=sorted(options))
