"""From a trigger to a complete or aborted epoch."""
