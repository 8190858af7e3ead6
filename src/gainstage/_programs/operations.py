"""The operations of JAX, each in one row of one table, with its traits.

What an equation does with its operands is in `patterns.py`.
"""

import enum
from collections.abc import Iterator


class Trait(enum.Flag):
    """A property of an operation."""

    PRODUCT = enum.auto()  # sums products: half precision is for these
    CHEAP = enum.auto()  # may be in half precision if its operands are
    PASSES = enum.auto()  # a result as exact as its operands
    ADDS = enum.auto()  # adds two numbers, of which a small one matters little
    POWER = enum.auto()  # raises to a power, which overflows soon
    MOVES = enum.auto()  # moves numbers, or chooses one of them
    VIEW = enum.auto()  # the operand in another shape, or dtype
    WHOLE = enum.auto()  # makes whole numbers
    CHOICE = enum.auto()  # chooses, and so is not linear
    INDEX = enum.auto()  # takes rows: those of a parameter count as data
    SUM = enum.auto()  # grows with the batch, as does its error
    PERIODIC = enum.auto()  # needs an exact angle
    FIRST = enum.auto()  # a first operand near whose pole rounding changes the kind of result
    SECOND = enum.auto()  # the same of a second operand
    ALGEBRA = enum.auto()  # of a library of linear algebra, which has none in half precision
    CALL = enum.auto()  # only calls one program inside
    CALLBACK = enum.auto()  # calls Python
    DEVICES = enum.auto()  # the same on several devices: the derivative is a sum over them
    OPAQUE = enum.auto()  # its program is not written in operations on whole arrays


_T = Trait
OPERATIONS: tuple[tuple[str, Trait], ...] = (
    ("dot_general conv_general_dilated ragged_dot ragged_dot_general", _T.PRODUCT),
    ("add sub", _T.CHEAP | _T.PASSES | _T.ADDS),
    ("add_any", _T.CHEAP | _T.PASSES | _T.ADDS),  # of derivatives
    ("mul neg max min abs select_n clamp tanh logistic", _T.CHEAP | _T.PASSES),
    ("sign erf", _T.CHEAP),
    ("integer_pow", _T.CHEAP | _T.PASSES | _T.POWER),
    ("square", _T.PASSES | _T.POWER),
    ("custom_jvp_call", _T.PASSES | _T.CALL),  # such as relu
    ("reshape transpose squeeze expand_dims copy broadcast_in_dim", _T.MOVES | _T.VIEW),
    ("convert_element_type", _T.VIEW),  # which moves from float32 to float32
    ("slice rev concatenate pad dynamic_update_slice split unstack", _T.MOVES),
    ("sharding_constraint optimization_barrier stop_gradient name", _T.MOVES),
    ("pvary", _T.MOVES | _T.VIEW | _T.DEVICES),
    ("gather dynamic_slice", _T.MOVES | _T.INDEX),
    ("take", _T.INDEX),
    ("reduce_max reduce_min reduce_window_max reduce_window_min", _T.MOVES | _T.CHOICE),
    ("round floor ceil", _T.MOVES | _T.CHOICE | _T.WHOLE),
    ("reduce_sum cumsum cumlogsumexp reduce_window_sum scatter-add scatter_add", _T.SUM),
    ("reduce_prod cumprod", _T.SUM | _T.FIRST),
    ("sin cos tan", _T.PERIODIC),
    ("log log1p sqrt rsqrt cbrt acos asin acosh atanh erf_inv lgamma digamma", _T.FIRST),
    ("div rem", _T.SECOND),
    ("pow", _T.FIRST | _T.SECOND),
    ("cholesky cholesky_update lu qr geqrf geqp3 householder_product eig eigh svd", _T.ALGEBRA),
    ("ormqr schur hessenberg tridiagonal tridiagonal_solve triangular_solve", _T.ALGEBRA),
    ("symmetric_product", _T.ALGEBRA),
    ("jit pjit closed_call core_call core_closed_call named_call xla_call", _T.CALL),
    ("remat remat2 checkpoint", _T.CALL),
    ("custom_vjp_call custom_vjp_call_jaxpr custom_lin custom_transpose_call", _T.CALL),
    ("pure_callback io_callback debug_callback debug_print", _T.CALLBACK),
    ("shard_map pallas_call custom_partitioning run_state core_map ffi_call", _T.OPAQUE),
    ("custom_call tpu_custom_call triton_kernel_call", _T.OPAQUE),
)


def _rows() -> Iterator[tuple[str, Trait]]:
    for names, traits in OPERATIONS:
        yield from ((name, traits) for name in names.split())


TRAITS = dict(_rows())


def names_with(trait: Trait) -> frozenset[str]:
    """The names of the operations that have a trait."""
    return frozenset(name for name, traits in TRAITS.items() if trait in traits)


PRODUCTS = names_with(_T.PRODUCT)
MOVES = names_with(_T.MOVES)
VIEWS = names_with(_T.VIEW)
CHOICES = names_with(_T.CHOICE)
WHOLES = names_with(_T.WHOLE)
