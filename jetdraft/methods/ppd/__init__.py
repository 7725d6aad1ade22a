"""PPD (2405.18628): prompt tokens that the target reads, in sparse trees."""
