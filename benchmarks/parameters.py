"""The sets of tensors that the optimizers update: shapes as in real models, fixed random values."""

import numpy as np

Shape = tuple[int, ...]


def shapes(name: str) -> list[Shape]:
    """The shapes of a set: `one`, `resnet50`, `gpt2`, or `tinyN`: N tensors of 64 elements."""
    if name.startswith("tiny"):
        return [(64,)] * int(name.removeprefix("tiny"))
    return {"one": lambda: [(25_000_000,)], "resnet50": resnet50, "gpt2": gpt2}[name]()


def resnet50() -> list[Shape]:
    """ResNet-50: 161 tensors, 25.6 million elements."""
    result: list[Shape] = []

    def convolution(size: int, inputs: int, outputs: int) -> None:
        result.extend([(size, size, inputs, outputs), (outputs,), (outputs,)])  # with batch norm

    convolution(7, 3, 64)
    inputs = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            convolution(1, inputs, width)
            convolution(3, width, width)
            convolution(1, width, 4 * width)
            if block == 0:
                convolution(1, inputs, 4 * width)
            inputs = 4 * width
    return [*result, (2048, 1000), (1000,)]


def gpt2() -> list[Shape]:
    """GPT-2 small: 148 tensors, 124 million elements."""
    width, norm = 768, [(768,), (768,)]

    def dense(inputs: int, outputs: int) -> list[Shape]:
        return [(inputs, outputs), (outputs,)]

    attention = [*norm, *dense(width, 3 * width), *dense(width, width)]
    feedforward = [*norm, *dense(width, 4 * width), *dense(4 * width, width)]
    return [(50257, width), (1024, width), *(attention + feedforward) * 12, *norm]


def values(name: str, seed: int) -> list[np.ndarray]:
    """Normally distributed float32 values for every tensor of a set."""
    rng = np.random.default_rng(seed)
    return [0.02 * rng.standard_normal(shape, np.float32) for shape in shapes(name)]


def size(name: str) -> int:
    """The number of elements of a set."""
    return sum(int(np.prod(shape)) for shape in shapes(name))
