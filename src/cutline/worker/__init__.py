"""Runs the operators: batches, snapshots, sink commits. Everything here runs in the Spark driver."""
