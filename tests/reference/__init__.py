"""The reference model and its operations, judged by hand, by golden tensors and by transformers."""
