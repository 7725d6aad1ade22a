"""What trainings have in common whose teacher is the target."""
