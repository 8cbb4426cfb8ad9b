"""What a flow can be restored to: the commands that show, keep, name and restore it."""
