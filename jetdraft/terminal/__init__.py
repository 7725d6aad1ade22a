"""What the verbs share on a terminal: grouped options, progress bars, summaries."""
