"""What sources, sinks and the replay guard need to talk to servers that keep a log. No Spark in here."""
