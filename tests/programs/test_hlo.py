"""What is read from the text of a program."""

import pytest

from benchmarks import hlo

pytestmark = pytest.mark.as_users

PROGRAM = """HloModule jit_step, is_scheduled=true

%inner (p.0: f32[100], p.1: s32[]) -> f32[10] {
  %p.0 = f32[100]{0} parameter(0)
  %p.1 = s32[] parameter(1)
  ROOT %slice = f32[10]{0} dynamic-slice(%p.0, %p.1), dynamic_slice_sizes={10}
}

%cheap (p: f32[100]) -> f32[100] {
  ROOT %p = f32[100]{0} parameter(0)
}

%dear (p: f32[100]) -> f32[100] {
  %p.2 = f32[100]{0} parameter(0)
  ROOT %copy.1 = f32[100]{0} copy(%p.2)
}

ENTRY %main (x: f32[100], i: s32[], h: f16[8,4]) -> (f32[10], f32[100]) {
  %x = f32[100]{0} parameter(0), metadata={op_name="x"}
  %i = s32[] parameter(1)
  %h = f16[8,4]{1,0} parameter(2)
  %fused = f32[10]{0} fusion(%x, %i), kind=kLoop, calls=%inner
  %near = f16[8,4]{1,0:T(8,128)S(1)} copy(%h)
  %cond = f32[100]{0} conditional(%i, %x, %x), branch_computations={%cheap, %dear}
  %sum = f32[100]{0} all-reduce(%cond), replica_groups={}, to_apply=%add
  %dot = (f16[8,4]{1,0}, s8[4194304]{0}) custom-call(%h, %h), custom_call_target="__cublas$gemm"
  %first = f16[8,4]{1,0} get-tuple-element(%dot), index=0
  ROOT %out = (f32[10]{0}, /*index=1*/f32[100]{0}) tuple(%fused, %sum)
}
"""


def test_a_program_is_counted():
    """Slices count as what they take, memory on the chip and workspaces as nothing, an operand
    that is given twice once, and a conditional as its larger branch."""
    found = hlo.counts(PROGRAM)
    fused, near, copied, reduced, dot = 10 * 4 + 4, 8 * 4 * 2, 400, 400, 8 * 4 * 2
    assert found.read == fused + near + copied + reduced + dot
    assert found.written == 10 * 4 + 0 + 400 + 400 + 8 * 4 * 2
    assert (found.kernels, found.conditionals, found.copies) == (5, 1, 2)
    assert found.collectives == (400,)


@pytest.mark.parametrize(
    ("shape", "bytes_"),
    [
        ("f32[]", 4),
        ("(f32[2,3]{1,0}, pred[5])", 29),
        ("f8e4m3fn[7]", 7),
        ("s4[3]", 2),
        ("token[]", 0),
        ("c64[2]", 16),
        ("bf16[<=4]", 8),
    ],
)
def test_the_bytes_of_a_shape(shape, bytes_):
    """Every element type has its bits; a tuple has what is in it."""
    assert hlo.nbytes(shape) == bytes_
