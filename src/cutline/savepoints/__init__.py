"""Named checkpoints that a person owns, and flows cloned from them."""
