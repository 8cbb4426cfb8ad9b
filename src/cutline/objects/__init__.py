"""Adapters of ``cutline.ports.objects``: a folder, the memory of this process, S3 and similar services."""

from __future__ import annotations

from cutline.objects.opening import open_store

__all__ = ["open_store"]
