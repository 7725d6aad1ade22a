"""The parts of a checkpoint, read one by one."""
