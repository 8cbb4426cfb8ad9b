"""Runs the coordinator: it triggers, completes, aborts and releases checkpoints."""
