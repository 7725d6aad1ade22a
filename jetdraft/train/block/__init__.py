"""The trainings of drafters that fill a block: DFlash heads and diffusion models."""
