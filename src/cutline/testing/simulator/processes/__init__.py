"""What dies: the processes of a flow on one host, driven by the protocol's own code."""
