"""Number formats of expert weights."""

from enum import Enum


class Scheme(Enum):
    """Number format of the expert weights, by its name in a deployment file (``ffn.weights``)."""

    PLAIN = "plain"  # the serving dtype
    FP8_BLOCK = "fp8_block"  # FP8, one float32 scale per 128 x 128
    MXFP4 = "mxfp4"  # e2m1, one power of two per 32 columns
