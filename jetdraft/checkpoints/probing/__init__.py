"""Models whose rows can carry probes, and the files in which these are kept."""
