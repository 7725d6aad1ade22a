"""Methods whose drafter is attached to a part of the target."""
