"""The tokens of a target and its drafter, which must agree; their matrices may not."""

from __future__ import annotations

from collections.abc import Mapping

from tokenizers import Tokenizer

from jetdraft.bundle import DRAFTER, TARGET
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.draft_vocabulary import MOST_PADDING
from jetdraft.checkpoints.reading.tokenizer_reader import read_tokenizer
from jetdraft.errors import CheckpointError, PairError, printable


def compare_tokenizers(sources: Mapping[str, str]) -> None:
    """Refuse a pair with two tokenizers before any weight is read, which takes long."""
    if DRAFTER not in sources:
        return
    pair = sources[TARGET], sources[DRAFTER]
    try:
        texts = [read_tokenizer(source) for source in pair]
    except CheckpointError:
        return  # loading says it in better words
    _compare(*pair, *texts)


def check_tokens(target: Checkpoint, drafter: Checkpoint) -> None:
    """Raise `PairError` for a drafter whose ids are other tokens than the target's.

    Where a checkpoint has no tokenizer, matrices of about as many rows must do.
    """
    _compare(target.source, drafter.source, target.tokenizer, drafter.tokenizer)
    rows = target.vocab_size, drafter.vocab_size
    known = target.tokenizer is not None and drafter.tokenizer is not None
    if not known and abs(rows[0] - rows[1]) > MOST_PADDING:
        raise PairError(
            f"{drafter.source} has {rows[1]} tokens, {target.source} has {rows[0]}, "
            "and without both tokenizers the tokens cannot be compared; add them, or "
            "choose a drafter with the same tokenizer"
        )


def _compare(target: str, drafter: str, ours: str | None, theirs: str | None) -> None:
    """Raise `PairError` unless each id that both tokenizers have is one token."""
    if ours is None or theirs is None:
        return
    one, other = (
        {i: token for token, i in Tokenizer.from_str(text).get_vocab().items()}
        for text in (ours, theirs)
    )
    for i in sorted(one.keys() & other.keys()):
        if one[i] != other[i]:
            tokens = (printable(repr(token), 60) for token in (other[i], one[i]))
            raise PairError(
                f"{drafter} has another tokenizer than {target}: token {i} is "
                f"{', not '.join(tokens)}; choose a drafter with the same tokenizer"
            )
