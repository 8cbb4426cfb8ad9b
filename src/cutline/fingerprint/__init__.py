"""Which code a flow is made of: hashes of its graph, functions, sinks and versions. Changes nothing."""
