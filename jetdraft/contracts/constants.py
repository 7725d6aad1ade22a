"""The numbers that the exporter and the runtime must agree on."""

CANDIDATES = 64  # K: a row's candidates, or the whole vocabulary.
WIDEST = 16  # The most rows of a pass that a controller plans.
CAPACITY, MAX_WIDTH = 2048, 128  # Defaults of an export.
MIN_SELECTED = 16  # The least rows that a selecting pass reads.
HIDDEN = -1e4  # Added to the score of a slot that a row may not see; fits float16.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
FRAMES_PER_SLOT = 2  # Frames of a spectrum that Whisper's encoder makes one slot of.
