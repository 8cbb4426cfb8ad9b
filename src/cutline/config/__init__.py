"""The options: declared, loaded, checked against one another."""
