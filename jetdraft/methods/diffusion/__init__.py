"""SpecDiff (2408.05636): a small diffusion model fills a block of masks."""
