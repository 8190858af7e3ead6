"""The operations of JAX, each in one row of one table, for `autocast`, plans, X-rays and `lint`.

What an equation does with its operands is in `patterns.py`.
"""

import enum


class Trait(enum.Flag):
    """A property of an operation."""

    PRODUCT = enum.auto()  # sums products: half precision is for these
    CHEAP = enum.auto()  # may be in half precision if its operands are
    PASSES = enum.auto()  # a result as exact as its operands
    ADDS = enum.auto()  # adds two numbers, of which a small one matters little
    POWER = enum.auto()  # raises to a power, which overflows soon
    MOVES = enum.auto()  # moves numbers, or chooses one of them
    VIEW = enum.auto()  # the operand in another shape, or dtype
    CHOICE = enum.auto()  # chooses, and so is not linear
    INDEX = enum.auto()  # takes rows: those of a parameter count as data
    SUM = enum.auto()  # grows with the batch, as does its error
    FIRST = enum.auto()  # a first operand near whose pole rounding changes the kind of result
    SECOND = enum.auto()  # the same of a second operand
    ALGEBRA = enum.auto()  # of a library of linear algebra, which has none in half precision
    CALL = enum.auto()  # only calls one program inside
    CALLBACK = enum.auto()  # calls Python
    DEVICES = enum.auto()  # the same on several devices: the derivative is a sum over them
    OPAQUE = enum.auto()  # its program is not written in operations on whole arrays


class Does(enum.Enum):
    """What an operation does to the power of a loss scale that is in its operands."""

    KEEP = enum.auto()  # that of the first operand; indices and shapes have none
    SUM = enum.auto()  # that of all operands, if it is the same
    TIMES = enum.auto()
    DIVIDE = enum.auto()
    POWER = enum.auto()
    FORGET = enum.auto()  # none, whatever the operands have
    EACH = enum.auto()  # each result has that of its own operand


_T, _D = Trait, Does
_NO = Trait(0)
# The names of operations, their traits, and what they do to a loss scale, if that is known.
OPERATIONS: tuple[tuple[str, Trait, Does | None], ...] = (
    ("dot_general conv_general_dilated ragged_dot ragged_dot_general", _T.PRODUCT, _D.TIMES),
    ("add sub", _T.CHEAP | _T.PASSES | _T.ADDS, _D.SUM),
    ("add_any", _T.CHEAP | _T.PASSES | _T.ADDS, _D.SUM),  # of derivatives
    ("mul", _T.CHEAP | _T.PASSES, _D.TIMES),
    ("neg abs", _T.CHEAP | _T.PASSES, _D.KEEP),
    ("max min select_n clamp", _T.CHEAP | _T.PASSES, _D.SUM),
    ("tanh logistic", _T.CHEAP | _T.PASSES, None),
    ("sign", _T.CHEAP, _D.FORGET),
    ("erf", _T.CHEAP, None),
    ("integer_pow", _T.CHEAP | _T.PASSES | _T.POWER, _D.POWER),
    ("square", _T.PASSES | _T.POWER, _D.POWER),
    ("custom_jvp_call", _T.PASSES | _T.CALL, None),  # such as relu
    ("reshape transpose squeeze expand_dims copy broadcast_in_dim", _T.MOVES | _T.VIEW, _D.KEEP),
    ("convert_element_type", _T.VIEW, _D.KEEP),  # which moves from float32 to float32
    ("slice rev split unstack sharding_constraint name", _T.MOVES, _D.KEEP),
    ("concatenate pad dynamic_update_slice", _T.MOVES, _D.SUM),
    ("optimization_barrier", _T.MOVES, _D.EACH),
    ("stop_gradient", _T.MOVES, None),
    ("pvary", _T.MOVES | _T.VIEW | _T.DEVICES, _D.KEEP),
    ("gather dynamic_slice", _T.MOVES | _T.INDEX, _D.KEEP),
    ("take", _T.INDEX, _D.KEEP),
    ("reduce_max reduce_min reduce_window_max reduce_window_min", _T.MOVES | _T.CHOICE, _D.KEEP),
    ("round floor ceil", _T.MOVES | _T.CHOICE, _D.KEEP),
    ("reduce_sum cumsum reduce_window_sum", _T.SUM, _D.KEEP),
    ("cumlogsumexp", _T.SUM, None),
    ("scatter-add scatter_add", _T.SUM, _D.SUM),
    ("reduce_prod cumprod", _T.SUM | _T.FIRST, None),
    ("sqrt rsqrt cbrt", _T.FIRST, _D.POWER),
    ("log log1p acos asin acosh atanh erf_inv lgamma digamma", _T.FIRST, None),
    ("div", _T.SECOND, _D.DIVIDE),
    ("rem", _T.SECOND, _D.SUM),
    ("pow", _T.FIRST | _T.SECOND, _D.POWER),
    ("cholesky cholesky_update lu qr geqrf geqp3 householder_product eig eigh", _T.ALGEBRA, None),
    ("svd ormqr schur hessenberg tridiagonal tridiagonal_solve", _T.ALGEBRA, None),
    ("symmetric_product", _T.ALGEBRA, None),
    ("triangular_solve", _T.ALGEBRA, _D.DIVIDE),
    ("jit pjit closed_call core_call core_closed_call named_call xla_call", _T.CALL, None),
    ("remat remat2 checkpoint", _T.CALL, None),
    ("custom_vjp_call custom_vjp_call_jaxpr custom_lin custom_transpose_call", _T.CALL, None),
    ("pure_callback io_callback debug_callback debug_print", _T.CALLBACK, None),
    ("shard_map pallas_call custom_partitioning run_state core_map ffi_call", _T.OPAQUE, None),
    ("custom_call tpu_custom_call triton_kernel_call", _T.OPAQUE, None),
    ("real imag conj copy_p reduce_precision top_k bitcast_convert_type fft", _NO, _D.KEEP),
    ("cummax cummin select_and_scatter_add select_and_gather_add", _NO, _D.KEEP),
    ("psum psum2 psum_invariant pmax pmin pmean all_gather all_gather_invariant", _NO, _D.KEEP),
    ("all_to_all ppermute reduce_scatter pcast pbroadcast reshard device_put", _NO, _D.KEEP),
    ("layout_constraint", _NO, _D.KEEP),
    ("stack complex nextafter scatter", _NO, _D.SUM),
    ("eq ne lt gt le ge eq_to lt_to le_to is_finite not and or xor", _NO, _D.FORGET),
    ("argmax argmin reduce_and reduce_or iota axis_index", _NO, _D.FORGET),
    ("sort", _NO, _D.EACH),
)  # fmt: skip
TRAITS = {name: traits for names, traits, _ in OPERATIONS for name in names.split()}
DOES = {name: does for names, _, does in OPERATIONS if does for name in names.split()}


def names_with(trait: Trait) -> frozenset[str]:
    """The names of the operations that have a trait."""
    return frozenset(name for name, traits in TRAITS.items() if trait in traits)


PRODUCTS = names_with(_T.PRODUCT)
MOVES = names_with(_T.MOVES)
VIEWS = names_with(_T.VIEW)
CHOICES = names_with(_T.CHOICE)
