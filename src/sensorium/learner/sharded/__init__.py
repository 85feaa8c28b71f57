"""One model on several ranks with FSDP2. Nothing here is imported by a run in one process: it costs seconds."""
