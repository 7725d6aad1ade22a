"""Who drafts how much: options, methods, planner, controller."""
