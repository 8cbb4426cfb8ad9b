"""The local tier: checkpoints, blobs, generations, coordinator records."""
