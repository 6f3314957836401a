"""How far results in floating point may lie from their judges; the one table, each number with its reason.

Numbers are relative errors in the Frobenius norm, ``|found - expected| / |expected|``, unless they say
otherwise. What is bytes or integers is compared for equality, without a row here.
"""

from __future__ import annotations

# Attention, indexer and stores, `tests/kernels`.
#: Some hundred float64 operations: 100 * 2^-53, and one order of room.
FLOAT64_SUMS = 1e-13
#: Sums of some hundred float32 products in another order: 2^-24 * sqrt(512), and one order of room.
FLOAT32_SUMS = 1e-5
#: One rounding to bfloat16: 2^-9 at most, 2^-9 / sqrt(3) on average over mantissas.
BF16_ROUNDING = 2**-9
#: Share of INT8 codes that may differ by one from a reference whose float32 sums have another order: such a
#: value lies within 1e-6 of the middle between two codes.
CODE_FLIPS = 1e-3
#: Parts of split keys, rounded to float16 against their largest magnitude: half a unit of 11 bits.
FLOAT16_PARTS = 2**-11
#: Attention with probabilities and result rounded to bfloat16.
ATTENTION_BF16 = 4e-3

# Routed experts, `tests/kernels`.
#: One INT8 digit per activation, against float64. INT8 per token is 8.7e-3 on gaussian rows of 4096; it
#: happens twice, and SwiGLU's products have heavier tails: 0.020 to 0.024 was measured.
W4A8_ERROR = 0.025
#: Two digits: what is left are BF16 activations between the products and the BF16 result.
W4A16_ERROR = 0.006
#: A kernel against the reference of the same arithmetic, both with bfloat16 rounding between the products on
#: one side only: 2^-9 / sqrt(3) each, and for one digit the activations that round to another INT8 number.
MOE_AGAINST_REFERENCE = {"w4a8": 1.5e-2, "w4a16": 4e-3}

# ---- the reference model, `tests/reference`

#: Logits of two float32 implementations: they differ in the order of sums. Measured 1e-6 to 2e-6.
FLOAT32_MODELS = 1e-5
#: The same, largest difference over the standard deviation of the logits. Measured 1e-5.
FLOAT32_MODELS_MAX = 5e-5
#: Logits of the tiny model `plain` against the exact ones, decisions replayed: BF16 between operations, with
#: experts in BF16 or in two INT8 digits. Measured 1.0e-2.
BF16_MODEL = 3e-2
#: The same with experts in one INT8 digit, or with weights that the repack rounds. Measured 2.2e-2.
SM80_MODEL = 5e-2
#: The same with the roundings of the official model, and between it and SM80. Measured 9e-2.
OFFICIAL_MODEL = 0.15
#: The same, mean Kullback-Leibler divergence in nats. Measured 4e-3.
OFFICIAL_MODEL_KL = 1e-2
#: Logits of a sequence in pieces against the whole, activations rounded, decisions replayed: a sum in another
#: order may put a value on the other side of a border between two codes. Measured 8e-3.
ROUNDED_IN_PIECES = 3e-2
#: Elements, relative: ten float32 operations on numbers of one sign.
FLOAT32_STEPS = 1e-5
#: Elements near 1, absolute: rotation by angles of up to 100, which float32 holds to 2^-18.
FLOAT32_ROTATION = 3e-5
#: Largest relative error of a route weight in float32: a dot product of 4096, a root and a division.
ROUTE_WEIGHT = 1e-6

# ---- SGLang's own code around the reference kernels, `tests/sglang`

#: INT8 codes of index keys: half a step of the scale, and the float32 way to it.
HALF_A_STEP = 0.51
#: Share of the best keys that INT8 queries must find among 700, and how far from the border of the selection,
#: in standard deviations of the scores, a key may lie that they trade for another.
INDEX_FOUND, INDEX_BORDER = 0.97, 0.05

# ---- the vision tower, `tests/vision`

#: Two small blocks: norms, angles and rotations are float32, as in the official code, everything else as wide
#: as the weights. 2^-24 an operation, some dozen of them one after the other.
FLOAT32_TOWER = 3e-6
#: The same in bfloat16: 2^-9 / sqrt(3) a rounding, about 20 of them one after the other.
BF16_TOWER = 2e-2
