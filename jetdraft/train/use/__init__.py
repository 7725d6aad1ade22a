"""Learning from use: a drafter is trained on the places where its drafts were wrong."""
