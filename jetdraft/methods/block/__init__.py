"""SpecDec (2203.16487): the drafter of an encoder-decoder fills a block of masks."""
