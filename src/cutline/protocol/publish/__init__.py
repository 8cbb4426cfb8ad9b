"""Which sink publishes which epoch, and by which permit."""
