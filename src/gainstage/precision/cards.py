"""The cards that a precision is priced for: their arithmetic and their memory, as published."""

import math
import re
from typing import NamedTuple

import jax


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


# A card that multiplies TF32 does so by default for float32 products in JAX. Rates of GeForce cards
# are those with sums in float32, as XLA has them.
CARDS = {
    card.name: card
    for card in (
        Card("B200", 1100.0, 2250.0, 2250.0, 4500.0, 7.7, "NVIDIA HGX B200 datasheet, dense"),
        Card("H200", 494.7, 989.4, 989.4, 1978.9, 4.8, "NVIDIA H200 SXM datasheet, dense"),
        Card("H100", 494.7, 989.4, 989.4, 1978.9, 3.35, "NVIDIA H100 SXM5 datasheet, dense"),
        Card("A100", 156.0, 312.0, 312.0, 0.0, 2.039, "NVIDIA A100 80GB SXM datasheet, dense"),
        Card("L40S", 183.0, 362.05, 362.05, 733.0, 0.864, "NVIDIA L40S datasheet, dense"),
        Card("L4", 60.0, 121.0, 121.0, 242.5, 0.3, "NVIDIA L4 datasheet, half of the sparse rates"),
        Card("A10", 62.5, 125.0, 125.0, 0.0, 0.6, "NVIDIA A10 datasheet, dense"),
        Card("T4", 8.1, 65.0, 0.0, 0.0, 0.32, "NVIDIA T4 datasheet"),
        Card("V100", 15.7, 125.0, 0.0, 0.0, 0.9, "NVIDIA V100 SXM2 datasheet"),
        Card("RTX 5090", 104.8, 209.5, 209.5, 419.0, 1.792, "NVIDIA RTX Blackwell whitepaper"),
        Card("RTX 5080", 56.3, 112.6, 112.6, 225.1, 0.96, "NVIDIA RTX Blackwell whitepaper"),
        Card("RTX 4090", 82.6, 165.2, 165.2, 330.3, 1.008, "NVIDIA Ada architecture whitepaper"),
        Card("RTX 4080", 48.7, 97.5, 97.5, 194.9, 0.717, "NVIDIA Ada architecture whitepaper"),
        Card("RTX 3090", 35.6, 71.0, 71.0, 0.0, 0.936, "NVIDIA GA102 architecture whitepaper"),
        Card("RTX 3080", 29.8, 59.5, 59.5, 0.0, 0.76, "NVIDIA GA102 architecture whitepaper"),
        Card("TPU v4", 275.0, 0.0, 275.0, 0.0, 1.2, "Google Cloud TPU v4 documentation"),
        Card("TPU v5e", 197.0, 0.0, 197.0, 0.0, 0.819, "Google Cloud TPU v5e documentation"),
        Card("TPU v5p", 459.0, 0.0, 459.0, 0.0, 2.765, "Google Cloud TPU v5p documentation"),
        Card("TPU v6e", 918.0, 0.0, 918.0, 0.0, 1.638, "Google Cloud TPU v6e documentation"),
        Card("TPU v7", 2307.0, 0.0, 2307.0, 4614.0, 7.37, "Google Cloud TPU7x documentation"),
    )
}
H100 = CARDS["H100"]
# Words of what JAX calls a device, in small letters, and the card.
DEVICE_KINDS = {
    "tpu v5 lite": "TPU v5e",
    "tpu v6 lite": "TPU v6e",
    "tpu7x": "TPU v7",
    **{name.lower(): name for name in CARDS},
    "tpu v5": "TPU v5p",
}


def known_card(name: str | None) -> Card:
    """The card of a name, in small or large letters; for None that of this machine, or an H100 on
    a CPU and on a card whose rates are not known.

    Raises:
        ValueError: there is none.
    """
    if name is None:
        kind = jax.devices()[0].device_kind.lower()
        words = re.findall("[a-z0-9]+", kind)
        found = next(
            (DEVICE_KINDS[known] for known in DEVICE_KINDS if _names(words, known)), "H100"
        )
        return CARDS[found]
    for card in CARDS.values():
        if isinstance(name, str) and _plain(card.name) == _plain(name):
            return card
    raise ValueError(f"Expected one of {list(CARDS)} for card; got {name!r}.")


def _plain(name: str) -> str:
    """A name without what people write in different ways."""
    return re.sub("[^a-z0-9]", "", name.lower())


def _names(words: list[str], known: str) -> bool:
    """Whether the words of a kind of device have those of a card, one after the other."""
    wanted = known.split()
    return any(words[i : i + len(wanted)] == wanted for i in range(len(words)))


# On which float8 always saves time: to measure what it costs in all layers that can have it.
ANY = Card("any card", 1.0, 1.0, 1.0, math.inf, math.inf, "")
