"""Code without domain knowledge: files that survive a power cut, records, logging, retries."""
