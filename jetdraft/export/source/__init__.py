"""Encoder-decoders: the encoder's graph, and a decoder that reads what it wrote."""
