"""Programs for who develops jetdraft; none is in the wheel."""
