"""The training of drafters: one loop, to which each method brings a task."""
