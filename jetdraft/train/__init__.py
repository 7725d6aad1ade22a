"""The trainers of probes, of drafters, of heads and of tables."""

TRAINERS = {
    "streams": "Add speculative streams to a checkpoint.",
    "drafter": "Train a small model that drafts for a target.",
    "head": "Train a head that reads the target's hidden states.",
    "kangaroo": "Train an adapter that drafts with the target's lower layers.",
    "exit": "Train a head that stops a text, or leaves the target's upper layers out.",
    "glide": "Train a layer that drafts from the target's keys and values.",
    "chimera": "Train a layer that drafts from three tokens and all of the target's "
    "states.",
    "falcon": "Train a head that drafts several tokens in a pass.",
    "ppd": "Add prompt tokens to a checkpoint.",
    "forecast": "Add forecasts that see a learned prefix to a checkpoint.",
    "acceptance": "Teach a drafter when to stop.",
    "table": "Count a trigram table in text files.",
}
"""The modules that `jetdraft train` runs; each has a click command `command`."""
