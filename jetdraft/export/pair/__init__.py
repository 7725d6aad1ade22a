"""What an export does to a drafter for its target: a cut, a recipe, its acceptance."""
