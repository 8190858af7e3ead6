"""The cards that a precision is priced for: their arithmetic and their memory, as published."""

import math
from typing import NamedTuple


class Card(NamedTuple):
    """The peak rates of a card for dense products, as its maker publishes them."""

    name: str
    float32: float  # TFLOP/s, as JAX multiplies float32 by default
    float16: float  # 0 if it has no products of this dtype
    bfloat16: float
    float8: float
    memory: float  # TB/s
    source: str

    def multiplies(self, dtype: str) -> bool:
        """Whether it has products of a dtype; others are upcast to float32."""
        return bool(getattr(self, dtype, self.float32))

    def rate(self, dtype: str) -> float:
        """Multiplications and additions per second."""
        return 1e12 * (getattr(self, dtype, 0.0) or self.float32)


# A card that multiplies TF32 does so by default for float32 products in JAX.
CARDS = {
    card.name: card
    for card in (
        Card("H100", 494.7, 989.4, 989.4, 1978.9, 3.35, "NVIDIA H100 SXM5 datasheet, dense"),
        Card("A100", 156.0, 312.0, 312.0, 0.0, 2.039, "NVIDIA A100 80GB SXM datasheet, dense"),
        Card("L4", 60.0, 121.0, 121.0, 242.5, 0.3, "NVIDIA L4 datasheet, half of the sparse rates"),
        Card("T4", 8.1, 65.0, 0.0, 0.0, 0.32, "NVIDIA T4 datasheet"),
        Card("V100", 15.7, 125.0, 0.0, 0.0, 0.9, "NVIDIA V100 SXM2 datasheet"),
        Card("TPU v5e", 197.0, 0.0, 197.0, 0.0, 0.819, "Google Cloud TPU v5e documentation"),
        Card("TPU v7", 2307.0, 0.0, 2307.0, 4614.0, 7.37, "Google Cloud TPU7x documentation"),
    )
}
H100 = CARDS["H100"]


def known_card(name: str) -> Card:
    """The card of a name.

    Raises:
        ValueError: there is none.
    """
    if name not in CARDS:
        raise ValueError(f"Expected one of {list(CARDS)} for card; got {name!r}.")
    return CARDS[name]


# On which float8 always saves time: to measure what it costs in all layers that can have it.
ANY = Card("any card", 1.0, 1.0, 1.0, math.inf, math.inf, "")
