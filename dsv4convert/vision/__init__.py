"""Pictures: where they stand among the tokens (`layout`), and what they become (`tower`).

`layout` needs the standard library alone; a scheduler may import it in every process. `tower` loads torch
and, for decoding, Pillow. `probe` and the shim of the server use both, so that the two cannot disagree.
"""
