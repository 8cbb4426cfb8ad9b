"""What survives the death of a process: disks with synced and unsynced content, one bucket, the sinks' targets."""
