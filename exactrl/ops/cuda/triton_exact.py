"""What every Triton kernel of the contract shares."""

from __future__ import annotations

import triton.language as tl

EXACT = {"enable_fp_fusion": False}
"""Options of every launch: a product and a sum are never contracted."""
LOG2E = tl.constexpr(1.44269502162933349609375)  # log2 e as fp32
