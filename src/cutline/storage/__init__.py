"""Snapshots on the local tier: pinned by hard link, kept by content, recorded per operator, committed by a manifest."""
