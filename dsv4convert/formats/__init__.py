"""Number formats of DeepSeek-V4 checkpoints: descriptors, codes, decoding, repacking."""
