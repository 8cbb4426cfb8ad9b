"""An in-memory twin of every port's adapter: as strict as the real one, and fast."""
