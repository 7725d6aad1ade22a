"""The drafter, or lookup where lookup is right more often (2312.11462)."""
