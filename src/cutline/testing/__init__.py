"""Test tools for authors of sinks, stores and flows; nothing in here runs in production."""

from __future__ import annotations

import sys

# Failing assertions inside a shipped suite should show values like those in a test file. Only pytest itself, while it
# runs, can arrange that, and only before the suite is imported.
if "pytest" in sys.modules:
    sys.modules["pytest"].register_assert_rewrite("cutline.testing.conformance")
