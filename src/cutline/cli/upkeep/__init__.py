"""Whether everything is in order, and what brings it in order: the commands that check and collect."""
