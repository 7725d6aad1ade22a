"""The lean runtime: numpy, onnxruntime and tokenizers, nothing heavier."""
